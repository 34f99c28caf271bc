// The storage of one node, below the server: where bytes lie, what is known about them, when they go. All calls are thread-safe.
//
// Order of a put: data written, index committed, answered. Order of a free: entry deleted, committed, reads in flight over, hole punched.
// Who calls what: the server's threads call discover, promise, withdraw, open_read, write, commit; Python's gc calls queues, peek, evict;
// threads of the store's own flush touches, sync each second, punch holes (paced), seal segments, look at what readers call bad.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "record.hpp"
#include "wire.hpp"

namespace kv {

struct StoreConfig {
  std::string dir;
  uint64_t capacity_bytes = 0;        // records with their padding; 0: no limit but the disk's
  uint64_t segment_bytes = 256u << 20;
  uint64_t index_map_bytes = 0;       // LMDB map size; 0: 2% of capacity, at least 1 GiB
  bool strict_sync = false;           // index mode "strict": every commit durable; else "relaxed": synced each second
  uint32_t bucket_seconds = 60;
  uint32_t pins_max = 1u << 20;       // promised extents at once; past it BUSY
  bool virtual_clock = false;         // the clock is what clients' buckets say (trace replay); else the host's
  uint64_t disk_reserve_bytes = 32u << 20;   // below this much free on the file system puts are refused: deleting needs room too
  // How long each class is kept, seconds; only the order matters here: a touch moves an extent to the longest-lived class.
  std::array<uint32_t, CLASSES_MAX> retention_seconds{0, 3600, 7 * 86400, 3 * 86400};
};

enum class Vote : uint32_t { YES = 0, UNSEEN = 1, BUDGET = 2 };   // on a write: not asked for before, or too much was written

class Segment;   // one append-only file; kept open while anyone reads it

// A shard held open for reading: its bytes stay where they are until this is destroyed. Move-only.
class ReadRef {
 public:
  ReadRef() = default;
  ReadRef(ReadRef&&) noexcept;
  ReadRef& operator=(ReadRef&&) noexcept;
  ~ReadRef();
  int fd() const;          // buffered
  int fd_direct() const;   // O_DIRECT, opened on first use; -1 with errno where the filesystem has none
  uint64_t segment_id() const;
  uint64_t offset = 0;         // of the record in its file, a multiple of RECORD_ALIGN
  uint64_t record_bytes = 0;
  uint32_t head_bytes = 0;
  uint32_t block_count = 0;
  std::vector<uint32_t> shard_bytes;   // of one piece, by plane: with these no byte of the head need be read to find a piece
  // From the record's start: where the sums / digests / pieces of one plane's blocks lie (block_count of each, in a row).
  uint64_t sums_at(uint32_t plane) const { return head_bytes + 8ull * plane * block_count; }
  uint64_t digests_at(uint32_t plane) const { return head_bytes + 8ull * shard_bytes.size() * block_count + 16ull * plane * block_count; }
  uint64_t pieces_at(uint32_t plane) const {
    uint64_t at = head_bytes + checks_bytes_of(uint32_t(shard_bytes.size()), block_count);
    for (uint32_t p = 0; p < plane; p++) at += uint64_t(shard_bytes[p]) * block_count;
    return at;
  }
 private:
  friend class StoreImpl;
  std::shared_ptr<Segment> segment_;   // held; must not outlive the store
};

// A record that is written and that nobody knows yet. Destroyed without a commit it was never there. Must not outlive the store.
struct Put {
  virtual ~Put() = default;
  Status status = Status::INTERNAL;   // after the commit: what to answer
};
using Puts = std::vector<std::unique_ptr<Put>>;

class Store {
 public:
  // Throws std::runtime_error with one clear line (directory in use: names the pid; wrong version; not writable).
  static std::unique_ptr<Store> open(const StoreConfig& config);
  virtual ~Store() = default;   // close(clean) was called, or this is a crash

  // --- hot verbs (any thread) ---
  // Appends a DISCOVER reply body for `count` keys to `out`.
  virtual void discover(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) = 0;
  virtual void promise(const wire::PromiseRequest& request, const wire::WritingName* names, wire::PromiseAnswer* answers) = 0;
  virtual void withdraw(const Owner& owner, const wire::WritingName* names, uint32_t count, uint32_t* statuses) = 0;
  // What is remembered of writings that began with these keys and went: a WHY reply's body goes to `out`.
  virtual void why(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) = 0;
  // A vote on each of `count` extent keys that a client wants to write; `votes` gets as many numbers of Vote. Marks them as asked for.
  virtual void admit(const Owner& owner, const uint8_t* keys, uint32_t count, uint32_t bucket, uint32_t* votes) = 0;
  virtual Status open_read(const Owner& owner, const wire::ReadExtent& extent, ReadRef& out) = 0;
  // `record` is 4 KiB-aligned memory of at least align_up(bytes, 4096); padding is zeroed here. Checks everything and writes. Null: `status`
  // says why not.
  virtual std::unique_ptr<Put> write(uint8_t* record, uint64_t bytes, Status& status) = 0;
  // Makes all of them known, in one transaction: it costs about 8 pages of the index however many they are. Sets each one's status.
  virtual void commit(Puts& puts) = 0;
  Status put(uint8_t* record, uint64_t bytes);   // both
  // Readers call these shards bad: those that are held are looked at soon, by a thread of the store's own. `statuses` gets OK, NOT_FOUND or BUSY.
  virtual void suspect(const Owner& owner, const wire::SuspectShard* shards, uint32_t count, uint32_t* statuses) = 0;
  // A read of this node found head or checks bad: looked at at once, and dropped if the disk says so too.
  virtual void report_corrupt(const Owner& owner, const uint8_t* extent_key, uint64_t write_id, uint8_t shard) = 0;

  virtual uint32_t bucket_now() const = 0;
  virtual void close(bool clean) = 0;   // stops maintenance; clean: flush, sync, clean-stop mark
};

}  // namespace kv
