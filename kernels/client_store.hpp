// A store: blocks of the caller's memory become records of k+m shards on as many nodes. docs/CLIENT.md is the text to this.
//
// One thread (Writer) cuts, codes and sums one extent after the other; the bulk loops send what it has made, straight from the caller's
// memory. An extent *refers* to that memory until every shard of it is sent, given up, or copied aside (a node that lags behind 11
// acknowledgements); only then is it finished, and a job is finished with its last extent. Then the memory is the caller's again.
//
// Lock order: extent, then writer. Connections are told by posting to their loop.
#pragma once
#include <deque>
#include <random>

#include "client_net.hpp"
#include "client_load.hpp"

namespace kv::client {

struct StoreConfig {
  uint64_t queue_bytes_max = 1u << 30;      // of blocks not yet sent; past it the oldest are dropped
  uint64_t flight_bytes_max = 48u << 20;    // of blocks being sent: about six extents
  uint64_t aside_bytes_max = 16u << 20;     // copied for one lagging node; past it its shards are given up
  int64_t deadline_ns = 10 * SECOND;        // of one extent, from its first byte
  int64_t lag_floor_ns = 500 * MS;         // patience for the (k+1)th acknowledgement: a busy disk stalls for less
};

// Numbers shared with kvstore/client/native.py. The outcome of one extent.
enum class Stored : uint8_t { PENDING = 0, STORED = 1, DEGRADED = 2, FAILED = 3, DROPPED = 4 };

struct StoreExtentPlan {
  uint64_t write_id;
  uint32_t start_block, count, row, pg;
  int32_t nodes[SHARDS_MAX];
};

struct StorePlan {
  Owner owner{};
  std::vector<PlaneSpec> planes;
  std::vector<StoreExtentPlan> extents;
  std::vector<uint8_t> block_keys;     // of each row
  std::vector<uint32_t> earlier;       // starts of extents of this chain known before
  const uint8_t* base = nullptr;
  size_t row_stride = 0;
  uint64_t write_epoch = 0, layout_tag = 0;
  uint32_t block_bytes = 0, bucket = 0, kv_group = 0;
  uint16_t depth = 0;
  uint8_t retention_class = 0, fidelity = 0;
};

struct StoreStats {
  std::atomic<uint64_t> extents_stored{0}, extents_degraded{0}, extents_failed{0}, extents_dropped{0}, bytes_stored{0}, bytes_dropped{0}, bytes_failed{0},
      shards_acknowledged{0}, shards_failed{0}, shards_aside{0}, shards_given_up{0}, withdrawals{0};
  std::atomic<uint64_t> bytes_busy{0};   // failed, too: more than m nodes were busy
  std::atomic<uint64_t> shards_no_space{0}, shards_busy{0}, shards_stale_map{0}, shards_draining{0}, shards_unreachable{0};   // of shards_failed
  std::atomic<uint64_t> queued_bytes{0}, flight_bytes{0};
};

void count_failed(StoreStats& stats, Outcome why);

class Writer;
class StoreExtent;

struct StoreJob {
  uint64_t id = 0;
  StorePlan plan;
  std::mutex mutex;
  uint32_t open = 0;                   // extents not finished
  std::vector<uint8_t> outcomes;       // Stored
  std::vector<uint8_t> acks;
  uint64_t newer_epoch = 0;            // of the cluster map, for which a node refused a shard; 0: none did
};

// One shard on its way. Loop thread of its connection only, but for what is fixed.
struct WriteTask {
  std::shared_ptr<StoreExtent> extent;   // null once copied aside: then nobody waits for the answer
  uint32_t shard = 0, node = 0, tries = 0;
  uint64_t request_id = 0, bytes = 0, sent = 0;
  std::vector<uint8_t> aside;            // the bytes from aside_at on
  uint64_t aside_at = 0;
  bool refers = true;                    // may still read the caller's memory
  bool gone = false;                     // given up: not to be sent or awaited any more
};

class WriteConn final : public Conn {
 public:
  WriteConn(Net& net, Node& node, Writer& writer);
  static std::shared_ptr<WriteConn> of(Net& net, Node& node, Writer& writer);   // null while the node is held for down
  // Loop thread.
  void add(std::shared_ptr<WriteTask> task);
  void set_aside(const std::shared_ptr<WriteTask>& task);
  bool on_sweep(int64_t now) override;

 protected:
  void on_open() override { send_more(); }
  void on_read() override;
  bool has_more() override { return !queue_.empty(); }
  void send_more() override;
  void on_closed(Outcome why) override;

 private:
  void on_reply(const wire::FrameHeader& header);
  std::shared_ptr<Writer> writer_;
  std::deque<std::shared_ptr<WriteTask>> queue_, awaiting_;
  uint64_t aside_bytes_ = 0;
  int64_t last_moved_ns_ = 0;
  uint8_t header_[sizeof(wire::FrameHeader)];
  uint32_t header_got_ = 0;
};

class StoreExtent : public std::enable_shared_from_this<StoreExtent> {
 public:
  StoreExtent(Writer& writer, std::shared_ptr<StoreJob> job, uint32_t index);
  ~StoreExtent();
  void encode();
  void send();
  // Next parts of shard's frame from byte `from` on: at most `max` parts and about `bytes_max` bytes. Returns how many parts.
  uint32_t parts(const WriteTask& task, uint64_t bytes_max, iovec* out, uint32_t max) const;
  void name_request(const WriteTask& task);          // writes the request id into the frame
  void on_result(WriteTask& task, Outcome result);   // acknowledged, refused or lost
  void on_stale(uint64_t epoch);                     // refused, for the node's map has this epoch
  void on_released(WriteTask& task);                 // it no longer refers to the caller's memory
  bool lagging(int64_t now);                         // checks the deadlines; resolves when they are over. True when it may need to again
  void drop();                                       // before send()
  void abandon();                                    // no loop runs any more
  uint64_t user_bytes() const { return plan().count * uint64_t(job_->plan.block_bytes); }
  bool too_many_busy() const { return busy_ > m_; }   // locked, or finished
  uint64_t shard_frame_bytes() const { return prefix_bytes_ + payload_bytes_; }

 private:
  friend class WriteConn;
  const StoreExtentPlan& plan() const { return job_->plan.extents[index_]; }
  uint8_t* prefix(uint32_t shard) const { return prefixes_.get() + shard * prefix_stride_; }
  void resolve(Stored outcome);                      // locked
  void finish_if_released();                         // locked
  void withdraw();

  Writer& writer_;
  const std::shared_ptr<StoreJob> job_;
  const uint32_t index_, k_, m_;
  uint64_t prefix_bytes_ = 0, prefix_stride_ = 0, payload_bytes_ = 0, parity_bytes_ = 0;
  std::unique_ptr<uint8_t[]> prefixes_;              // by shard: frame header, head, checks
  uint8_t* parity_ = nullptr;                        // by parity shard: its payload
  struct Cut { uint32_t first = 0; std::unique_ptr<uint8_t[]> bytes; };
  std::vector<Cut> cut_;                             // by plane: data shards from `first` on, padded, each all blocks
  std::vector<uint64_t> plane_at_;                   // in the payload

  std::mutex mutex_;
  std::vector<std::shared_ptr<WriteTask>> tasks_;
  uint32_t acks_ = 0, busy_ = 0, pending_ = 0, refers_ = 0;
  uint64_t newer_epoch_ = 0;
  Stored outcome_ = Stored::PENDING;
  bool finished_ = false;
  int64_t started_ns_ = 0, enough_ns_ = 0;           // enough: k shards are acknowledged
};

class Writer : public std::enable_shared_from_this<Writer> {
 public:
  Writer(std::shared_ptr<LoadShared> shared, const StoreConfig& config);
  ~Writer();
  void start();
  uint64_t add(StorePlan plan);      // queues its extents; the job's id
  struct Done { uint64_t id; std::vector<uint8_t> outcomes, acks; uint64_t newer_epoch; };
  std::vector<Done> wait_done(int64_t timeout_ns);   // jobs finished since the last call; empty when time has passed or all is over
  void stop();                       // what is queued is dropped; what is on its way is finished by its loops
  void abandon();                    // after the loops have ended: what is open has failed
  void finished(StoreExtent& extent, const std::shared_ptr<StoreJob>& job, uint32_t index, Stored outcome, uint32_t acks, uint64_t newer_epoch,
                bool in_flight);

  const std::shared_ptr<LoadShared> shared;
  const StoreConfig config;
  StoreStats stats;
  Learnt ack_delay;

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_, done_changed_;
  std::deque<std::shared_ptr<StoreExtent>> queue_;
  std::vector<std::shared_ptr<StoreExtent>> flight_;
  std::vector<Done> done_;
  uint64_t next_job_ = 1, queued_bytes_ = 0, flight_bytes_ = 0;
  bool stopping_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace kv::client
