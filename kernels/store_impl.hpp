// The one implementation of the Store seam. One file per concern:
//   store.cpp           the hot verbs
//   store_commit.cpp    every change of the index, and what follows from it in RAM
//   store_start.cpp     opening, the start scan, closing, the filter's file
//   store_rebuild.cpp   after an unclean stop: freeing what nobody owns, making a lost index again
//   store_maintain.cpp  touches, syncs, sealing, punching, growing the filter
//   store_evict.cpp     what gc asks: queues, peek, evict, ghosts
//   store_admit.cpp     votes on what to write
//   store_suspects.cpp  shards that readers call bad, and scrubs: looked at, and dropped where the disk says so
//   store_check.cpp     check_integrity(), bulk_index() for benchmarks
//   store_bind.cpp      the Python face
//
// Locks, in the order in which they are taken: gate_ (shared by every verb, exclusive while a damaged index is replaced),
// commit_mutex_ (all changes of the index), then one of: filter_mutex_, limbo_mutex_, those inside Pins, Touches, SegmentFiles.
// Free of a place: entry deleted and row in `freed` committed -> limbo, until the lookups of that time are over (epoch_) and
// nobody reads the place (Segment::is_read) -> punched, row removed.
#pragma once
#include <condition_variable>
#include <functional>
#include <map>
#include <shared_mutex>
#include <thread>

#include "dirstate.hpp"
#include "filter.hpp"
#include "ghosts.hpp"
#include "index.hpp"
#include "pins.hpp"
#include "seen.hpp"
#include "segments.hpp"
#include "server_stats.hpp"
#include "store.hpp"
#include "suspects.hpp"

namespace kv {

struct QueueId {
  uint8_t queue;               // index.hpp: class and reuse
  Owner owner;
  auto operator<=>(const QueueId&) const = default;
};
struct QueueTotals { int64_t rows = 0, bytes = 0; };
struct PeekedRow { RecencyKey row; uint64_t bytes; };
struct Evicted { size_t row; uint8_t retention_class; uint64_t bytes; uint64_t age_seconds; };
struct Usage { uint64_t used_bytes, zombie_bytes, capacity_bytes, disk_free_bytes; double index_share; };
struct Damage { uint32_t segment; uint64_t offset, record_bytes; uint8_t shard; bool read; };   // a record that was dropped; read: and its sums fail
struct Scrubbed { std::vector<uint8_t> after; uint64_t bytes = 0, damaged = 0; };   // after: the last record looked at; empty: of all
struct SyntheticShape { uint32_t block_count, block_bytes, start_block, bucket; uint8_t k, m, shard, retention_class; };

// Counters, all since the start of this process.
struct Counters {
  std::atomic<uint64_t> puts{0}, puts_existing{0}, puts_no_space{0}, puts_refused{0}, puts_corrupt{0}, put_bytes{0};
  std::atomic<uint64_t> discover_keys{0}, discover_filtered{0}, discover_writings{0};
  std::atomic<uint64_t> promises{0}, promises_held{0}, promises_busy{0}, touches_dropped{0};
  std::atomic<uint64_t> reads{0}, reads_absent{0}, withdrawn{0};
  std::atomic<uint64_t> corrupt_reported{0}, corrupt_found{0}, index_faults{0};
  std::atomic<uint64_t> suspects_damaged{0}, suspects_unfounded{0}, suspects_absent{0}, suspects_refused{0};   // of readers' reports
  std::atomic<uint64_t> scrubbed_bytes{0};
  std::atomic<uint64_t> evicted{0}, evict_skipped{0}, punches{0}, punched_bytes{0}, punch_errors{0}, segments_removed{0}, io_errors{0};
  std::atomic<uint64_t> orphan_bytes{0}, recovered{0}, recovery_dropped{0}, unknown_versions{0};
  std::atomic<uint64_t> votes[3] = {};          // by Vote
};

class StoreImpl final : public Store {
 public:
  Histogram write_seconds;   // of records handed to the file system

  explicit StoreImpl(const StoreConfig& config);   // throws std::runtime_error, DirectoryInUse
  ~StoreImpl() override;

  void discover(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) override;
  void promise(const wire::PromiseRequest& request, const wire::WritingName* names, wire::PromiseAnswer* answers) override;
  void withdraw(const Owner& owner, const wire::WritingName* names, uint32_t count, uint32_t* statuses) override;
  Status open_read(const Owner& owner, const wire::ReadExtent& extent, ReadRef& out) override;
  std::unique_ptr<Put> write(uint8_t* record, uint64_t bytes, Status& status) override;
  void commit(Puts& puts) override;
  void suspect(const Owner& owner, const wire::SuspectShard* shards, uint32_t count, uint32_t* statuses) override;
  void report_corrupt(const Owner& owner, const uint8_t* extent_key, uint64_t write_id, uint8_t shard) override;
  uint32_t bucket_now() const override;
  void close(bool clean) override;

  // --- for gc ---
  std::vector<std::pair<QueueId, QueueTotals>> queues();
  std::vector<PeekedRow> peek(const QueueId& queue, uint32_t limit, const RecencyKey* after);
  std::vector<Evicted> evict(const std::vector<RecencyKey>& rows, GhostReason reason);
  // What is evicted unused is remembered; written again, it is of the reused from the start (S3-FIFO's ghost queue).
  void set_second_chance(bool on);
  void set_admission(bool second_touch, uint64_t budget_bytes_per_day);   // 0: no budget
  void set_pressure_at(uint64_t bytes) { pressure_at_ = bytes; }
  // Bytes that puts found no room for since the last call; 1 if only pressure_at was passed or poke() was called; 0: the time is over.
  uint64_t wait_pressure(double timeout_seconds);
  Usage usage();
  void why(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) override;
  void admit(const Owner& owner, const uint8_t* keys, uint32_t count, uint32_t bucket, uint32_t* votes) override;
  std::vector<std::pair<uint32_t, GhostRow>> ghosts(const Owner& owner, const uint8_t* keys, uint32_t count);
  void poke() { poke_pressure(1); }
  // Looks at records in the order of the index, those behind `after` (empty: from the first), about `bytes_max` of them and at least one.
  Scrubbed scrub(const std::vector<uint8_t>& after, uint64_t bytes_max);
  void set_retentions(const std::array<uint32_t, CLASSES_MAX>& seconds);

  // --- for operators, tests and benchmarks ---
  bool wait_started(double timeout_seconds);    // the start scan is over
  void flush();                                 // touches in the index, everything synced, every free place punched that can be
  std::vector<std::string> check_integrity(bool deep);
  // Bad records that were dropped since the last call, the first few of them; and how many in all.
  std::pair<std::vector<Damage>, uint64_t> take_damages();
  uint64_t bulk_index(const Owner& owner, const uint8_t* keys, const uint64_t* write_ids, uint64_t count, const SyntheticShape& shape);
  std::vector<std::pair<std::string, uint64_t>> stats();
  std::string start_reason();
  const std::string& filter_start() const { return filter_start_; }   // "loaded"; why a saved one was not; empty: none was named
  std::string last_fault();                     // why the index was last found bad; empty: never
  StartMode start_mode() const { return start_mode_; }
  const StoreConfig& config() const { return config_; }
  uint64_t used_bytes() const { return uint64_t(std::max<int64_t>(0, used_bytes_.load())); }

 private:
  struct PutOp final : Put {
    PutOp() = default;                  // of an entry without a record
    PutOp(StoreImpl& store, uint64_t bytes) : of(&store), record_bytes(bytes) { of->writing_bytes_ += int64_t(padded_bytes()); }
    ~PutOp() override {
      if (of) of->settle(*this);
    }
    PutOp(const PutOp&) = delete;
    PutOp& operator=(const PutOp&) = delete;
    uint64_t padded_bytes() const { return align_up(record_bytes, RECORD_ALIGN); }
    StoreImpl* of = nullptr;            // until settled
    uint64_t record_bytes = 0;
    EntryKey key;
    RecencyKey recency;
    std::vector<uint8_t> value;
    std::shared_ptr<Segment> segment;   // null: no place was had
    uint64_t offset = 0;
    bool committed = false;             // or refused: `status` is final
  };
  struct Prefix {
    EntryKey from;
    size_t bytes;                // of it
  };
  struct Removed {
    EntryKey key;
    EntryFixed fixed;
    bool last_of_group, last_of_name;
    GhostRow ghost;
    size_t row = 0;              // of those that evict() was given
  };
  struct Freed {
    uint32_t segment, offset_4k, blocks_4k;
    uint64_t epoch;
    uint64_t since_ms;
  };
  using Ranges = std::map<uint32_t, std::vector<std::pair<uint32_t, uint32_t>>>;   // segment -> (offset/4096, 4 KiB blocks)

  // store.cpp
  template <class Body> bool with_index(Body&& body);   // false: no index now. Never nested.
  uint32_t now_seconds() const { return uint32_t(boottime_ms() / 1000) + 100; }
  uint32_t clamp_bucket(uint32_t bucket);
  uint32_t day_now() const;
  bool longer(uint8_t a, uint8_t b) const { return retention_[a & 15] > retention_[b & 15]; }
  uint64_t lookup_writing(Index::Reader& reader, const NameKey& name, EntryFixed& first);
  Status room_for(uint64_t padded_bytes);
  void poke_pressure(uint64_t wanted_bytes);

  // store_admit.cpp
  double clock_seconds() const;
  void refill_locked();
  void spend(uint64_t bytes);

  // store_commit.cpp
  void settle(PutOp& op);
  void commit_batch(std::vector<PutOp*>& batch);
  Status insert_entry(MDB_txn* txn, MDB_cursor* cursor, const PutOp& op, bool& first_of_group);
  void remove_entry(MDB_txn* txn, const EntryKey& key, const Entry& entry, GhostReason reason, std::vector<Removed>& removed);
  bool commit_removals(MDB_txn* txn, const std::vector<Removed>& removed);   // false: no space to delete; nothing happened
  bool remove_all(const std::vector<Prefix>& prefixes, GhostReason reason, std::vector<uint32_t>& counts);
  bool drop_corrupt(const EntryKey& key);   // false: it was gone, or there is no room to delete in
  void account(const EntryKey& key, const EntryFixed& fixed, int sign);
  bool in_totals(const uint8_t* key) const;
  void filter_insert(const uint8_t* key);
  void filter_erase(const uint8_t* key);
  void flush_touches();
  void apply_touches(Index& index, const std::vector<std::pair<NameKey, Touch>>& touches);

  // store_suspects.cpp
  enum class Looked : uint8_t { SOUND, DAMAGED, ABSENT };
  Looked look_at(const EntryKey& name, bool forget, uint64_t& bytes);   // bytes: read for it
  void run_suspects();

  // store_start.cpp
  StartMode decide_start(DirState& state, uint64_t& filter, std::string& reason);
  void take_filter();
  void save_filter_of_stop();
  void open_index(bool discard);
  void run_start();
  bool scan_index(bool with_totals, Ranges* owned);   // false: stopped
  void warm_index();
  void load_freed();
  void close_cleanly();
  void fault(const std::exception& why);
  std::string marker() const { return config_.dir + "/index.rebuild"; }

  // store_rebuild.cpp
  using Heads = std::vector<std::pair<uint32_t, std::vector<uint8_t>>>;   // (offset/4096, head)
  bool rebuild_segments();   // false: stopped, or the index failed
  bool rebuild_one(const std::shared_ptr<Segment>& segment);
  bool recover_entries(const std::shared_ptr<Segment>& segment, const Heads& heads, Ranges& owned);   // false: the index failed
  void clean_segment(const std::shared_ptr<Segment>& segment, std::vector<std::pair<uint32_t, uint32_t>> owned, bool seal);

  // store_maintain.cpp
  void run_maintenance();
  void run_sync();
  void sync_data();
  void look_at_disk();
  void look_for_zombies();
  void advance_epoch();
  void punch_some(uint64_t ms_max, size_t look, uint64_t after_ms);
  bool forget_freed(Index& index, const std::vector<Freed>& places);
  void remove_empty_segments();
  void replace_index();
  bool pause(uint32_t ms);   // false: stopping

  StoreConfig config_;
  std::unique_ptr<DirLock> lock_;
  DirState state_;
  std::atomic<StartMode> start_mode_{StartMode::FRESH};
  std::string start_reason_, filter_start_;
  uint64_t saved_filter_ = 0;                   // named by the state of the last stop
  SegmentFiles segments_;
  std::atomic<uint32_t> first_new_id_{1};       // segments below it are of an earlier run, or of an earlier index
  std::unique_ptr<Index> index_;
  std::shared_mutex gate_;
  std::atomic<bool> index_bad_{false};
  std::array<std::atomic<uint32_t>, CLASSES_MAX> retention_;
  std::atomic<uint32_t> virtual_bucket_{0};

  std::mutex queue_mutex_;
  std::vector<PutOp*> queue_;
  std::mutex commit_mutex_;
  std::atomic<uint64_t> deletes_{0};            // committed so far: a promise looks again when it changed
  std::map<QueueId, QueueTotals> totals_;       // guarded by commit_mutex_
  int64_t entries_ = 0;                         // guarded by commit_mutex_
  bool totals_ready_ = false;                   // guarded by commit_mutex_
  std::vector<uint32_t> empty_segments_;        // guarded by commit_mutex_
  bool scanning_ = false, scanning_totals_ = false;   // guarded by commit_mutex_; rows up to scan_at_ have been seen
  GroupKey scan_at_{};
  bool scan_begun_ = false;
  std::unique_ptr<CuckooFilter> scan_filter_;

  std::shared_mutex filter_mutex_;
  std::unique_ptr<CuckooFilter> filter_;        // none: every key may be here

  Pins pins_;
  Touches touches_;
  Tombstones tombstones_;
  std::mutex chances_mutex_;
  bool second_chance_ = false;                  // guarded by chances_mutex_, as is the next
  Seen chances_;
  std::mutex admit_mutex_;                      // guards the next six
  bool second_touch_ = false;
  double budget_per_day_ = 0, budget_left_ = 0, budget_at_ = 0;   // bytes, bytes, seconds
  uint64_t asked_generation_ = 0;
  Seen asked_;
  std::unique_ptr<Ghosts> ghosts_;
  Counters counters_;
  Suspects suspects_;
  std::mutex damages_mutex_;                    // guards the next two
  std::vector<Damage> damages_;
  uint64_t damages_count_ = 0;

  std::atomic<int64_t> used_bytes_{0};          // records of live entries, padded
  std::atomic<int64_t> parity_bytes_{0};        // of them, of parity shards; right once the start scan is over
  std::atomic<int64_t> freeing_bytes_{0};       // deleted, not yet punched
  std::atomic<int64_t> writing_bytes_{0};       // being written
  std::atomic<int64_t> disk_free_{INT64_MAX};
  std::atomic<uint64_t> zombie_bytes_{0};       // allocated in segments, and of neither entries nor footers nor about to be punched
  std::atomic<double> map_share_{0};
  std::atomic<uint64_t> pressure_at_{UINT64_MAX};
  std::mutex pressure_mutex_;
  std::condition_variable pressure_cv_;
  uint64_t wanted_bytes_ = 0;

  std::atomic<uint64_t> epoch_{2};
  std::array<std::atomic<uint64_t>, 2> in_epoch_{};
  std::mutex free_mutex_;                       // one thread at a time advances the epoch, punches and unlinks; taken before all others
  std::mutex limbo_mutex_;
  std::vector<Freed> limbo_;

  std::mutex stop_mutex_;
  std::condition_variable stop_cv_;
  bool stopping_ = false, started_ = false, closed_ = false, filter_wanted_ = false;
  std::atomic<uint64_t> start_ms_{0};
  std::mutex fault_mutex_;
  std::string last_fault_;
  std::thread starter_, maintainer_, syncer_, inspector_;
};

template <class Body>
bool StoreImpl::with_index(Body&& body) {
  if (index_bad_) return false;
  std::shared_lock gate(gate_);
  if (index_bad_) return false;
  try {
    body(*index_);
    return true;
  } catch (const IndexFault& why) {
    fault(why);
    return false;
  }
}

}  // namespace kv
