// The index of one node: an LMDB environment of three tables. docs/FORMAT.md is the text to this.
//
//   extents   owner 16 | extent key 32 | write id 8 | shard 1                          -> EntryFixed | tags | tail
//   recency   queue 1 | owner 16 | bucket BE4 | ~start BE4 | extent key 32 | write id 8 | shard 1 -> RecencyValue
//   (unnamed) "stop"                                                                   -> u64 of the last clean stop
//   freed     segment BE4 | offset/4096 BE4                                            -> u32 blocks of 4 KiB, deleted but not yet punched
//
// A queue is a class (lower four bits) of what was used again since it was written (bit 4) or was not.
// Recency rows sort in the order in which they go: within a queue and an owner the oldest first, later parts of a prompt first.
// Invariants: each extents row has exactly one recency row, written in the same transaction; a value's check covers its key.
#pragma once
#include <lmdb.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "record.hpp"

namespace kv {

inline constexpr size_t GROUP_BYTES = OWNER_BYTES + KEY_BYTES;   // owner | extent key
inline constexpr size_t NAME_BYTES = GROUP_BYTES + 8;            // ... | write id
inline constexpr size_t ENTRY_KEY_BYTES = NAME_BYTES + 1;        // ... | shard
inline constexpr size_t RECENCY_KEY_BYTES = 1 + OWNER_BYTES + 4 + 4 + KEY_BYTES + 8 + 1;
inline constexpr uint8_t ENTRY_VERSION = 1;
inline constexpr uint32_t SEGMENT_SYNTHETIC = 0;                 // of entries without bytes (benchmarks); files count from 1

using GroupKey = std::array<uint8_t, GROUP_BYTES>;
using NameKey = std::array<uint8_t, NAME_BYTES>;
using EntryKey = std::array<uint8_t, ENTRY_KEY_BYTES>;
using RecencyKey = std::array<uint8_t, RECENCY_KEY_BYTES>;

struct EntryFixed {
  uint32_t check;              // low 32 bits of xxh3-64(key | value from `segment` on)
  uint32_t segment, offset_4k, record_bytes;
  uint32_t bucket, start_block, pg, block_bytes;
  uint32_t kv_group;
  uint16_t depth, block_count;
  uint16_t earlier_count;
  uint8_t version, retention_class;
  uint8_t k, m, cipher, plane_count;
  uint64_t write_epoch, layout_tag;
  uint8_t fidelity, reused;    // 1: used in a later bucket than its first
  uint16_t tail_bytes;         // earlier starts as zigzag varint deltas | runs (varint count, varint shard_bytes / 32) over the planes
  uint32_t zero2;
};
static_assert(sizeof(EntryFixed) == 72);
struct RecencyValue { uint32_t record_4k, check; };   // check: low 32 bits of xxh3-64(key | record_4k)
static_assert(sizeof(RecencyValue) == 8);

// One decoded entry. `tags` and `tail` point into the value it was decoded from.
struct Entry {
  EntryFixed fixed;
  const uint8_t* tags = nullptr;   // block_count x u64
  const uint8_t* tail = nullptr;
  uint64_t padded_bytes() const { return align_up(fixed.record_bytes, RECORD_ALIGN); }
  uint32_t padded_4k() const { return uint32_t(padded_bytes() / RECORD_ALIGN); }
  uint32_t head_bytes() const { return head_bytes_of(fixed.plane_count, fixed.earlier_count, fixed.block_count); }
  bool earlier(uint32_t* out) const;                             // earlier_count numbers
  bool shard_bytes(std::vector<uint32_t>& out) const;            // plane_count numbers
};

inline constexpr uint8_t REUSED = 16;
inline uint8_t queue_of(uint8_t retention_class, bool reused) { return uint8_t(retention_class | (reused ? REUSED : 0)); }
inline uint8_t queue_of(const EntryFixed& f) { return queue_of(f.retention_class, f.reused); }

GroupKey group_key(const Owner& owner, const uint8_t* extent_key);
NameKey name_key(const Owner& owner, const uint8_t* extent_key, uint64_t write_id);
EntryKey entry_key(const Owner& owner, const uint8_t* extent_key, uint64_t write_id, uint8_t shard);
EntryKey entry_key_of(const RecordView& view);
NameKey name_of_entry(const EntryKey& key);
Owner owner_of_entry(const uint8_t* key);
RecencyKey recency_key(const uint8_t* entry_key, uint8_t queue, uint32_t bucket, uint32_t start_block);
EntryKey entry_key_of_recency(const uint8_t* row);
uint32_t bucket_of_recency(const uint8_t* row);

std::vector<uint8_t> encode_entry(const EntryKey& key, const RecordView& view, uint32_t segment, uint64_t offset, uint32_t bucket,
                                  bool reused = false);
// A changed copy of a value: place and sizes stay, last use and class move.
std::vector<uint8_t> with_last_use(const EntryKey& key, MDB_val value, uint32_t bucket, uint8_t retention_class, bool reused);
bool decode_entry(MDB_val key, MDB_val value, Entry& out);       // false: damaged
bool decode_front(MDB_val key, MDB_val value, EntryFixed& out);  // lengths and version only, not the check
RecencyValue recency_value(const RecencyKey& key, uint32_t record_4k);

// Raised on an LMDB answer that means damage or a fault of the disk; the index is then discarded and rebuilt.
struct IndexFault : std::runtime_error {
  IndexFault(const char* where, int rc) : std::runtime_error(std::string("index: ") + where + ": " + mdb_strerror(rc)), code(rc) {}
  int code;
};
inline bool out_of_space(int rc) { return rc == MDB_MAP_FULL || rc == ENOSPC || rc == EDQUOT || rc == MDB_TXN_FULL; }

class Index {
 public:
  // `fresh`: tables are made; else a missing one is a fault. Throws IndexFault.
  Index(const std::string& dir, uint64_t map_bytes, bool fresh);
  ~Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // A snapshot and a cursor over `extents`, taken from a pool.
  class Reader {
   public:
    explicit Reader(Index& index);   // throws IndexFault
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    MDB_txn* txn = nullptr;
    MDB_cursor* extents = nullptr;
    void refresh();                  // a newer snapshot
   private:
    Index& index_;
  };

  MDB_txn* begin_write();            // throws IndexFault; one at a time, ended by the thread that began it
  void sync() { mdb_env_sync(env, 1); }
  // Share of the map that tables hold. Deletions need free pages too (copy on write), so puts stop before 1.
  double map_share(MDB_txn* txn) const { return double(bytes_used(txn)) / double(map_bytes_); }
  uint64_t bytes_used(MDB_txn* txn) const;   // pages of all tables
  uint64_t entries() const;
  uint64_t last_txn() const;                 // number of the last commit
  // The number of the last clean stop, in the unnamed table; 0: none. Set by a commit of its own; false: no room. Throws IndexFault.
  bool set_stop(uint64_t stop);
  uint64_t stop();

  MDB_env* env = nullptr;
  MDB_dbi extents = 0, recency = 0, freed = 0;

 private:
  struct Slot { MDB_txn* txn; MDB_cursor* extents; };
  std::mutex pool_mutex_;
  std::vector<Slot> pool_;
  uint64_t map_bytes_ = 0;
};

// The first `bytes` of a found key are those of `prefix`: the end of a walk over a group or a writing.
inline bool has_prefix(const MDB_val& key, const uint8_t* prefix, size_t bytes) {
  return key.mv_size >= bytes && std::memcmp(key.mv_data, prefix, bytes) == 0;
}
inline MDB_val val(const void* p, size_t n) { return {n, const_cast<void*>(p)}; }
template <size_t N> MDB_val val(const std::array<uint8_t, N>& a) { return {N, const_cast<uint8_t*>(a.data())}; }
inline MDB_val val(const std::vector<uint8_t>& v) { return {v.size(), const_cast<uint8_t*>(v.data())}; }

inline uint32_t load_be32(const uint8_t* p) { return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3]; }
inline void store_be32(uint8_t* p, uint32_t v) {
  p[0] = uint8_t(v >> 24), p[1] = uint8_t(v >> 16), p[2] = uint8_t(v >> 8), p[3] = uint8_t(v);
}

}  // namespace kv
