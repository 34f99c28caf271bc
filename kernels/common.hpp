// Vocabulary shared by every native file: identities, status codes, checksums.
//
// Set in stone (stored on disk, sent on the wire): Status numbers, shard_seed(), shard_sum(), plane_digest().
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kv {

inline constexpr uint32_t KEY_BYTES = 32;
inline constexpr uint32_t OWNER_BYTES = 16;
inline constexpr uint32_t BLOCKS_PER_EXTENT_MAX = 64;
inline constexpr uint32_t EXTENT_BYTES_MAX = 8u << 20;   // more only when one block alone is larger
inline constexpr uint32_t BLOCK_BYTES_MAX = 64u << 20;
inline constexpr uint32_t K_MAX = 32, M_MAX = 4, SHARDS_MAX = K_MAX + M_MAX;
inline constexpr uint32_t PLANES_MAX = 255;
inline constexpr uint32_t EARLIER_MAX = 128;             // earlier extent starts a record may carry
inline constexpr uint32_t WRITINGS_MAX = 8;              // writings of one extent key side by side
inline constexpr uint32_t SHARD_ALIGN = 32;              // a plane is zero-padded to k * 32 bytes

// Outcomes on the wire, one table for all verbs. Ranges: 0 done, 1-19 not now or not here, 20-39 refused, 40-59 faults.
enum class Status : uint32_t {
  OK = 0,
  NOT_FOUND = 1,      // no such writing (or shard) here
  BUSY = 2,           // a limit is reached: ask elsewhere, or later
  NO_SPACE = 3,       // disk or index full
  EXISTS = 4,         // this very shard of this writing is stored already: counts as stored
  STALE_MAP = 5,      // the request's epoch is older than this node accepts for writes
  DRAINING = 6,       // the node is shutting down
  SUPERSEDED = 7,     // a window directory knows a later start of this agent, or hears it on another connection
  BAD_REQUEST = 20,   // the frame or a field in it is out of range
  TOO_LARGE = 21,     // length beyond the limit, refused before allocation
  BAD_VERSION = 22,   // protocol or format version not spoken here
  WRONG_CLUSTER = 23, // hello names another cluster
  TOMBSTONED = 24,    // this write id was withdrawn less than 60 s ago
  TOO_MANY_WRITINGS = 25, // WRITINGS_MAX writings of this extent key are here already
  UNAUTHORIZED = 26,  // reserved: capabilities
  CORRUPT = 40,       // bytes did not match their checksum
  IO_ERROR = 41,      // the disk answered with an error
  INTERNAL = 42,
};

enum class RetentionClass : uint8_t { NONE = 0, BATCH = 1, CHAT = 2, AGENT = 3 };   // 4..15: operator-defined
inline constexpr uint32_t CLASSES_MAX = 16;
enum class Fidelity : uint8_t { EXACT = 0, APPROX = 1, DECODE = 2 };

using Owner = std::array<uint8_t, OWNER_BYTES>;
using Key = std::array<uint8_t, KEY_BYTES>;

// Everything that names one shard of one (plane, block): checksums are seeded with it, so bytes of another place never pass.
struct ShardIdentity {
  uint8_t owner[OWNER_BYTES];
  uint8_t extent_key[KEY_BYTES];
  uint64_t write_id;
  uint32_t shard, plane, block, zero;   // block: ordinal inside the extent
};
static_assert(sizeof(ShardIdentity) == 72);

inline uint64_t shard_seed(const ShardIdentity& id) { return XXH3_64bits(&id, sizeof id); }
inline uint64_t shard_sum(const void* bytes, size_t n, uint64_t seed) { return XXH3_64bits_withSeed(bytes, n, seed); }

// shard_sum() of bytes that come in parts.
class ShardSum {
 public:
  void begin(uint64_t seed) { XXH3_64bits_reset_withSeed(&state_, seed); }
  void add(const void* bytes, size_t n) { XXH3_64bits_update(&state_, bytes, n); }
  uint64_t value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_{};
};

struct Digest { uint64_t low, high; };
static_assert(sizeof(Digest) == 16);

// xxh3-128 over block key | write id | checksums of the k data shards of this (plane, block).
inline Digest plane_digest(const uint8_t* block_key, uint64_t write_id, const uint64_t* data_sums, uint32_t k) {
  uint8_t buf[KEY_BYTES + 8 + 8 * K_MAX];
  std::memcpy(buf, block_key, KEY_BYTES);
  std::memcpy(buf + KEY_BYTES, &write_id, 8);
  std::memcpy(buf + KEY_BYTES + 8, data_sums, 8 * size_t(k));
  XXH128_hash_t h = XXH3_128bits(buf, KEY_BYTES + 8 + 8 * size_t(k));
  return {h.low64, h.high64};
}

inline uint64_t block_tag(const uint8_t* block_key) { uint64_t t; std::memcpy(&t, block_key + 8, 8); return t; }

inline uint32_t shard_bytes_of(uint32_t plane_bytes, uint32_t k) {
  uint32_t unit = k * SHARD_ALIGN;
  return (plane_bytes + unit - 1) / unit * SHARD_ALIGN;
}
inline constexpr uint64_t align_up(uint64_t n, uint64_t a) { return (n + a - 1) / a * a; }

}  // namespace kv
