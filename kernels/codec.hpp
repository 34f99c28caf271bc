// Erasure coding of shards: zfec's own generator matrix, computed by ISA-L. Set in stone: the matrix (it decides every parity byte).
//
// The matrix: V[0] = (1, 0, ..., 0), V[r][c] = a^((r-1)c) in GF(2^8) mod 0x11D with a = 2; G = V * inverse(top k rows of V).
// Its top k rows are the unit matrix (data shards are stored as they are), its last m rows make the parity shards k .. k+m-1.
//
// A plane of plane_bytes is coded as k data shards of shard_bytes each, as if zero-padded to k * shard_bytes. Data shards are read and
// written where they lie in the block, the one that the plane's end cuts too; padding is never written to a block.
// All methods are const and thread-safe; tables for decoding are made once per set of survivors.
#pragma once
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "common.hpp"

namespace kv {

// Real (not padding) bytes of data shard `shard` of a plane.
inline uint32_t shard_real_bytes(uint32_t plane_bytes, uint32_t shard_bytes, uint32_t shard) {
  const uint64_t start = uint64_t(shard) * shard_bytes;
  if (start >= plane_bytes) return 0;
  return plane_bytes - start < shard_bytes ? uint32_t(plane_bytes - start) : shard_bytes;
}

// ISA-L multiplication tables of `rows` output shards over k input shards (ascending shard number).
struct CodecTables {
  uint32_t k = 0, rows = 0;
  std::vector<uint8_t> bytes;
  void run(size_t len, const uint8_t* const* in, uint8_t* const* out) const;
};

class Codec {
 public:
  Codec(uint32_t k, uint32_t m);   // std::invalid_argument unless 1 <= k <= K_MAX, m <= M_MAX
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  uint32_t k() const { return k_; }
  uint32_t m() const { return m_; }
  const std::vector<uint8_t>& matrix() const { return matrix_; }   // (k+m) x k, row-major

  // parity[j] (m of them, `len` bytes each) of data[i] (k of them). Any len; buffers must not overlap.
  void encode(size_t len, const uint8_t* const* data, uint8_t* const* parity) const;

  // out[j] = shard want_ids[j] (data or parity), from k shards have[i] numbered have_ids[i], in any order.
  // False, and nothing written, for numbers that repeat, are out of range, or are both had and wanted.
  bool decode(size_t len, const uint32_t* have_ids, const uint8_t* const* have, const uint32_t* want_ids, uint32_t want,
              uint8_t* const* out) const;

  // Tables that make shards want_ids (ascending) from shards have_ids (ascending), for callers with loops of their own; null as decode's false.
  std::shared_ptr<const CodecTables> tables(const uint32_t* have_ids, const uint32_t* want_ids, uint32_t want) const;

  // Parity of one plane of `blocks` blocks. Block b's plane lies at plane + b * block_stride; its parity shard j goes to
  // parity[j] + b * shard_bytes. Requires plane_bytes <= k * shard_bytes.
  void encode_plane(uint32_t blocks, const uint8_t* plane, size_t block_stride, uint32_t plane_bytes, uint32_t shard_bytes,
                    uint8_t* const* parity) const;

  // Rebuilds lost data shards in place. Shards named in have_ids (k of them): data shards already lie in the blocks; parity shard p of
  // block b lies at parity[p - k] + b * shard_bytes (entries of parity shards not named may be null). Every data shard not named is
  // written to its place, its real bytes only. False, and nothing written, as for decode.
  bool rebuild_plane(uint32_t blocks, uint8_t* plane, size_t block_stride, uint32_t plane_bytes, uint32_t shard_bytes,
                     const uint32_t* have_ids, const uint8_t* const* parity) const;

 private:
  struct Sets {
    uint64_t have, want;
    bool operator==(const Sets&) const = default;
  };
  struct SetsHash {
    size_t operator()(const Sets& s) const { return XXH3_64bits(&s, sizeof s); }
  };
  std::shared_ptr<const CodecTables> tables_of(Sets sets) const;
  bool sets_of(const uint32_t* have_ids, const uint32_t* want_ids, uint32_t want, Sets& sets) const;

  uint32_t k_, m_;
  std::vector<uint8_t> matrix_;
  CodecTables encode_;
  mutable std::shared_mutex mutex_;
  mutable std::unordered_map<Sets, std::shared_ptr<const CodecTables>, SetsHash> cache_;
};

}  // namespace kv
