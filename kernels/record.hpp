// A record: one shard of one extent as it lies on disk, and byte for byte as a WRITE carries it. docs/FORMAT.md is the text to this.
//
//   head   fixed 256 B | plane table | earlier starts | tags | zero padding to 8
//   checks u64 sums[plane][block] | Digest digests[plane][block]
//   shards plane-major: plane 0 of all blocks, plane 1 of all blocks, ...; each piece shard_bytes(plane)
//   zero padding to 4 KiB (on disk only)
//
// Invariants: head_sum covers the whole head with head_sum itself zero; checks_sum covers the checks; each sum covers one piece.
// Never changes: the fixed part up to `version`. A new version may use reserved bytes; an unknown version is a counted miss.
#pragma once
#include "common.hpp"

namespace kv {

inline constexpr uint64_t RECORD_MAGIC = 0x313043455253564bull;  // "KVSREC01"
inline constexpr uint32_t RECORD_VERSION = 1;
inline constexpr uint32_t RECORD_ALIGN = 4096;
inline constexpr uint64_t RECORD_BYTES_MAX = 80ull << 20;

struct PlaneEntry { uint32_t plane_bytes, shard_bytes; };

struct RecordHead {
  uint64_t magic;
  uint32_t version;
  uint32_t head_bytes;       // fixed part + tables, multiple of 8
  uint64_t head_sum;         // xxh3-64 of the head with this field zero
  uint64_t record_bytes;     // head + checks + shards, without the 4 KiB padding
  uint8_t owner[OWNER_BYTES];
  uint8_t extent_key[KEY_BYTES];   // = key of the first block
  uint64_t write_id;
  uint8_t shard, k, m, plane_count;
  uint16_t block_count, earlier_count;
  uint32_t start_block;      // ordinal of the first block in its chain
  uint32_t pg;               // placement group, of write_epoch
  uint64_t write_epoch;
  uint32_t bucket;           // client's time bucket of the write
  uint32_t flags;            // zero
  uint64_t created_unix_ms;
  uint8_t retention_class, fidelity;
  uint16_t depth;            // of fidelity approx
  uint32_t kv_group;
  uint8_t cipher, zero1[3];
  uint32_t block_bytes;      // sum of plane_bytes
  uint64_t checks_sum;       // xxh3-64 of the checks
  uint64_t layout_tag;       // first 8 bytes of the layout digest
  uint8_t reserved[96];      // zero
};
static_assert(sizeof(PlaneEntry) == 8);
static_assert(offsetof(RecordHead, owner) == 32 && offsetof(RecordHead, write_id) == 80);
static_assert(offsetof(RecordHead, start_block) == 96 && offsetof(RecordHead, created_unix_ms) == 120);
static_assert(offsetof(RecordHead, block_bytes) == 140 && offsetof(RecordHead, checks_sum) == 144);
static_assert(sizeof(RecordHead) == 256);

inline uint32_t head_bytes_of(uint32_t planes, uint32_t earlier, uint32_t blocks) {
  return uint32_t(align_up(sizeof(RecordHead) + 8ull * planes + 4ull * earlier, 8) + 8ull * blocks);
}
inline uint64_t checks_bytes_of(uint32_t planes, uint32_t blocks) { return 24ull * planes * blocks; }

// Read-only view over the bytes of a head (and, where they follow in memory, its checks and shards). No copies.
struct RecordView {
  const uint8_t* base;
  const RecordHead& head() const { return *reinterpret_cast<const RecordHead*>(base); }
  const PlaneEntry* planes() const { return reinterpret_cast<const PlaneEntry*>(base + sizeof(RecordHead)); }
  const uint32_t* earlier() const { return reinterpret_cast<const uint32_t*>(base + sizeof(RecordHead) + 8ull * head().plane_count); }
  const uint64_t* tags() const {
    const uint64_t tables = sizeof(RecordHead) + 8ull * head().plane_count + 4ull * head().earlier_count;
    return reinterpret_cast<const uint64_t*>(base + align_up(tables, 8));
  }
  const uint64_t* sums(uint32_t plane) const {
    return reinterpret_cast<const uint64_t*>(base + head().head_bytes) + size_t(plane) * head().block_count;
  }
  const Digest* digests(uint32_t plane) const {
    const uint64_t sums_bytes = 8ull * head().plane_count * head().block_count;
    return reinterpret_cast<const Digest*>(base + head().head_bytes + sums_bytes) + size_t(plane) * head().block_count;
  }
  uint64_t plane_offset(uint32_t plane) const {  // of its first piece, from the record's start
    uint64_t at = head().head_bytes + checks_bytes_of(head().plane_count, head().block_count);
    for (uint32_t p = 0; p < plane; p++) at += uint64_t(planes()[p].shard_bytes) * head().block_count;
    return at;
  }
};

inline uint64_t head_sum_of(const uint8_t* head, uint32_t head_bytes) {
  XXH3_state_t s;
  XXH3_64bits_reset(&s);
  constexpr size_t at = offsetof(RecordHead, head_sum);
  const uint64_t zero = 0;
  XXH3_64bits_update(&s, head, at);
  XXH3_64bits_update(&s, &zero, 8);
  XXH3_64bits_update(&s, head + at + 8, head_bytes - at - 8);
  return XXH3_64bits_digest(&s);
}

// OK, BAD_VERSION, BAD_REQUEST (a field out of range: the bytes may be anything, nothing is trusted) or CORRUPT (checksum).
// `available` bytes may be read at `base`; every length is checked before it is used.
Status check_head(const uint8_t* base, uint64_t available);
// Everything: head, checks, each piece. `bytes` = head().record_bytes must be available. OK or CORRUPT / as check_head.
Status check_record(const uint8_t* base, uint64_t bytes);

}  // namespace kv
