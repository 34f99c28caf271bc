// A load: extents of a ticket from many nodes into the caller's memory. docs/CLIENT.md is the text to this.
//
// Each (extent, plane, shard) is a *place* with one owner: FREE -> RECEIVING while what has come of it is checked and copied there -> FREE or
// GOOD; LOST; REVOKED by whoever decodes it, and at the end of the load. A place is written by its receiver while RECEIVING, by the decoder
// when REVOKED, by nobody else, ever. It goes on with the stream that began it last. The states are bits of masks in PlaneWork under the extent's mutex; bytes move outside it.
// end() returns when every place is GOOD, LOST or REVOKED and no thread is inside one: the memory is the caller's again.
//
// Lock order: extent, then job. Neither is held while bytes move or while a connection is called.
#pragma once
#include <array>
#include <bit>
#include <deque>
#include <span>

#include "client_net.hpp"
#include "codec.hpp"
#include "record.hpp"

namespace kv::verbs {
class Landing;
}

namespace kv::client {

class LoadJob;

inline uint64_t bit(uint32_t shard) { return uint64_t(1) << shard; }

template <class F>
void each(uint64_t mask, F&& f) {   // f(number of each bit), ascending
  for (; mask; mask &= mask - 1) f(uint32_t(std::countr_zero(mask)));
}

struct PlaneSpec { uint32_t offset, bytes, shard_bytes; };

struct ExtentPlan {
  wire::WritingName name;
  uint32_t first_block;            // inside the extent
  uint32_t count;                  // blocks to read
  uint32_t row;                    // of the destination
  int32_t nodes[SHARDS_MAX];       // who holds shard i; -1: nobody
  uint64_t doubtful;               // shards whose nodes did not have them a moment ago: asked last
};

struct LoadPlan {
  Owner owner{};
  uint64_t epoch = 0;
  std::vector<PlaneSpec> planes;
  std::vector<ExtentPlan> extents;   // rows ascending, without gaps
  std::vector<uint8_t> block_keys;   // of each row
  uint8_t* base = nullptr;
  size_t row_stride = 0;
  uint32_t rows = 0;
  bool eager = false;
  bool by_plane = false;   // ask plane after plane over all extents, little ahead; else extent after extent, as the disk has them
};

struct LoadStats {
  std::atomic<uint64_t> shards_asked{0}, late_asked{0}, decodes{0}, bad_shards{0}, missing_shards{0}, failed_shards{0}, lagging_shards{0},
      extents_failed{0}, digest_mismatches{0}, parity_received{0}, parity_asked{0}, late_asked_errors{0}, decoded_pieces{0},
      extents_degraded{0};
};

// Buffers for parity, reused; at most `KEPT_BYTES_MAX` are kept. Any thread.
class Scratch {
 public:
  ~Scratch();
  uint8_t* take(size_t bytes);
  void give(uint8_t* buffer, size_t bytes);
  uint64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }   // taken or kept

 private:
  static constexpr size_t KEPT_BYTES_MAX = 64u << 20;
  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<uint8_t*>> free_;
  size_t kept_bytes_ = 0;
  std::atomic<uint64_t> held_bytes_{0};
};

// A shard whose bytes failed a check, for its node to be told. A row of the array Python gets; its dtype is asserted in client/native.py.
struct BadShard {
  Owner owner;
  wire::WritingName name;
  int32_t node;
  uint8_t shard, zero[3];
  bool operator==(const BadShard& o) const { return std::memcmp(this, &o, sizeof o) == 0; }
};
static_assert(sizeof(BadShard) == 64);

// Those of all loads, each once, until somebody takes them; past `KEPT_MAX` they are found again by the next load. Any thread.
class BadShards {
 public:
  void add(const BadShard& one);
  std::vector<BadShard> take();

 private:
  static constexpr size_t KEPT_MAX = 256;
  std::mutex mutex_;
  std::vector<BadShard> kept_;
  std::atomic<bool> any_{false};
};

// What all loads of a client share.
struct LoadShared {
  std::shared_ptr<Net> net;
  Codec codec;
  Scratch scratch;
  BadShards bad;
  LoadStats totals;
  Learnt delay{4 * MS, 200 * MS, 4.0};   // between "all but m data shards are there" and "all are"
  LoadShared(std::shared_ptr<Net> n, uint32_t k, uint32_t m) : net(std::move(n)), codec(k, m) {}
};

// One lease: what one connection brings for one load.
struct Stream {
  struct Item { uint32_t extent; uint8_t plane, shard; };
  struct Request { uint64_t id; uint32_t first_item; };
  std::shared_ptr<LoadJob> job;
  std::vector<Item> items;
  std::vector<Request> requests;
  uint32_t node = 0;
  std::atomic<int64_t> last_ns{0};          // when bytes of it came last, or it was asked
  std::atomic<bool> drain{false};           // its load is over
  uint32_t settled = 0;                     // leading items that came or will not; of who drives it
};

// Where an item goes.
struct Target {
  uint8_t *checks, *base;
  size_t stride, real;   // bytes from piece to piece; of a piece: what lies beyond is padding and goes nowhere
};

// How a connection gets its items by RDMA (client_verbs.cpp). The zone is a ring: items lie in it in the order in which they were asked.
struct VerbsLink {
  enum class State : uint8_t { MAKING, ASKED, CONNECTING, BINDING, READY };   // the first and the third: at Net::worker
  struct Flight { uint64_t end; uint32_t offset, bytes, round, ordinal; };    // an item that was asked; end: of its place in the ring
  State state = State::MAKING;
  std::shared_ptr<verbs::Landing> landing;
  uint64_t request_id = 0;
  uint8_t answer[sizeof(wire::FrameHeader) + sizeof(wire::VerbsOpen)];
  uint32_t answer_got = 0;
  std::deque<Flight> flights;
  uint64_t head = 0, tail = 0;      // of the ring, ever growing
  uint32_t credits = 0, untold = 0; // receives that the daemon knows of and no flight uses; and that it was not told of
  uint32_t round = 0;
  bool watched = false, proven = false;   // proven: an item came
};

class ReadConn final : public Conn {
 public:
  ReadConn(Net& net, Node& node, bool rdma);
  ~ReadConn() override;
  // Null: down, or at a limit. `body_bytes`: of the longest item.
  static std::shared_ptr<ReadConn> lease(Net& net, Node& node, bool fresh, uint64_t body_bytes);
  // Loop thread.
  void start(std::shared_ptr<Stream> stream);
  void go_on(const std::shared_ptr<Stream>& stream);   // more of it may be asked for
  void drain();          // its load is over: reads the rest, or closes where that is long
  bool on_sweep(int64_t now) override;
  void on_side() override;

 protected:
  void on_read() override;
  void on_closed(Outcome why) override;

 private:
  // By RDMA (client_verbs.cpp).
  static constexpr uint64_t ZONE_ALIGN = 64;
  void make_landing();
  void landed(std::shared_ptr<verbs::Landing> landing, const std::string& why, bool limit);
  void connected(bool fine, const std::string& why);
  void ready();
  void read_tcp();                    // what TCP says meanwhile
  bool read_answer();
  void no_rdma(const std::string& kind, const std::string& why, bool here);   // goes on over TCP, or closes
  void over_tcp_elsewhere(const std::string& kind, const std::string& why);
  void avoid_rdma(const std::string& kind, const std::string& why);
  void ask_by_rdma();
  void take_completions(bool all);
  bool arrived(uint32_t immediate);   // false: closed
  void land(const uint8_t* at);       // of the item that is due
  void let_go();                      // of the landing zone
  bool send_bytes(const std::vector<uint8_t>& bytes);   // false: closed
  bool ask();                         // for what may be asked by now; false: closed
  bool ask_by_tcp();
  static bool fits_zone(const Net& net, uint64_t body_bytes);
  std::unique_ptr<VerbsLink> link_;   // null: by TCP
  std::atomic<bool> rdma_;            // link_ is there: for lease()

  static constexpr size_t STEP_BYTES = 256 << 10;   // of one receive: checked and copied to its places while it is in the cache (L2 is 1 MiB)
  static uint8_t* buffer();   // the thread's, STEP_BYTES of it
  bool take(const uint8_t* at, size_t bytes);   // what has come; false: closed
  void take_body(const uint8_t* at, size_t bytes);   // of the item that is due; no more than is left of it
  bool fill(const LoadJob& job, const Stream::Item& item, const Target& to, const uint8_t* at, size_t bytes);   // false: a sum is wrong
  void heard_stream();
  bool announces_item(const wire::FrameHeader& header);
  void begin_body();
  bool parse_header();      // false: closed
  void next_item();
  void finish();

  std::shared_ptr<Stream> stream_;
  bool reused_ = false, heard_any_ = false, draining_ = false;
  int64_t drain_since_ns_ = 0, idle_since_ns_ = 0;
  uint32_t item_ = 0, request_ = 0;   // what is due
  uint32_t asked_ = 0, last_ = 0;     // items of the stream that were asked, and that will be
  uint64_t lease_ = 0;                // names stream_ at its places
  uint8_t header_[sizeof(wire::FrameHeader)];
  uint32_t header_got_ = 0;
  uint64_t body_bytes_ = 0, body_got_ = 0;
  bool discarding_ = false;           // the rest of the body
  ShardSum sum_;                      // of a piece that came in part
};

class LoadJob : public std::enable_shared_from_this<LoadJob> {
 public:
  LoadJob(std::shared_ptr<LoadShared> shared, LoadPlan plan);
  ~LoadJob();
  void start();
  // Waits until plane `plane` is settled for all rows still promised, or the load is over; false when the time has passed first.
  bool wait_plane(uint32_t plane, int64_t timeout_ns);
  bool wait_all(int64_t timeout_ns);
  uint32_t rows_of_plane(uint32_t plane) const;   // leading rows of which this plane is complete
  uint32_t rows() const;                          // leading rows of which all planes are
  void end();                                     // idempotent; afterwards the destination is untouched
  // Of each extent and plane: first bytes, all checked, decoding from, to; nanoseconds of CLOCK_MONOTONIC, 0: it did not happen.
  std::vector<std::array<int64_t, 4>> times() const;
  bool over() const { return over_.load(std::memory_order_acquire); }
  void cancel();                                  // any thread: waiters return

  LoadStats stats;

 private:
  friend class ReadConn;
  // A VERBS_READ of items [first, first + flights) of the stream.
  std::vector<uint8_t> verbs_frame(const Stream& stream, uint32_t first, std::span<const VerbsLink::Flight> flights, uint32_t credits) const;
  wire::ReadExtent read_extent(const Stream::Item& item) const;
  struct PlaneWork {
    uint64_t good = 0, lost = 0, receiving = 0, revoked = 0;   // places, by shard
    uint64_t revoke_wanted = 0, decoded = 0;
    uint64_t lagging = 0;      // asked, and later than the others
    uint64_t turned_to = 0;    // read or asked in the place of others
    bool complete = false, decoding = false, doubted = false;
    int64_t ready_ns = 0;      // all but m of the data shards are there or lost
    int64_t turned_ns = 0;     // when it last turned to another shard
    int64_t begun_ns = 0, complete_ns = 0;              // its first bytes, and all of them checked
    int64_t decode_begun_ns = 0, decode_ended_ns = 0;   // the last decoding of it
    uint8_t* parity[M_MAX] = {};
  };
  struct ExtentWork {
    mutable std::mutex mutex;
    std::vector<PlaneWork> planes;
    std::unique_ptr<uint8_t[]> checks;   // by plane, shard: sums and digests as they came; sums of rebuilt shards
    std::vector<uint64_t> leases;        // likewise: who began the place last
    uint8_t parity_order[M_MAX] = {};
    uint64_t spared = 0;       // not asked at first: their nodes owe other answers, or did not have them
    uint64_t asked = 0;
    bool failed = false, degraded = false;
  };
  struct Late { uint32_t extent, shard; };
  // What is to be done once no extent is locked.
  struct Todo {
    std::vector<Late> late;
    std::vector<uint32_t> failed;
  };
  // By ReadConn. claim: false when the bytes are unwanted; true makes the place RECEIVING until release.
  bool claim(const Stream::Item& item, uint64_t lease, bool from_start, Target& target);
  enum class Got : uint8_t { PART, WHOLE, BAD };
  void release(const Stream::Item& item, Got got);
  void lose(Stream& stream, uint32_t first, uint32_t end, Outcome why);
  uint64_t body_bytes(const Stream::Item& item) const;
  uint32_t blocks(const Stream::Item& item) const { return plan_.extents[item.extent].count; }
  uint32_t piece_bytes(const Stream::Item& item) const { return plan_.planes[item.plane].shard_bytes; }

  uint64_t data_mask() const { return (uint64_t(1) << k_) - 1; }
  uint8_t* place(uint32_t extent, uint32_t plane) const;                  // of the plane in the first row
  uint8_t* checks(uint32_t extent, uint32_t plane, uint32_t shard) const;
  const uint64_t* sums(uint32_t e, uint32_t p, uint32_t s) const { return reinterpret_cast<const uint64_t*>(checks(e, p, s)); }
  const Digest* digests(uint32_t e, uint32_t p, uint32_t s) const {
    return reinterpret_cast<const Digest*>(checks(e, p, s) + 8ull * plan_.extents[e].count);
  }
  uint64_t seed(uint32_t extent, uint32_t plane, uint32_t shard, uint32_t block) const;

  // With the extent's lock, which progress and decode may drop meanwhile.
  void progress(std::unique_lock<std::mutex>& lock, uint32_t extent, uint32_t plane, Todo& todo);
  void decode(std::unique_lock<std::mutex>& lock, uint32_t extent, uint32_t plane);
  void complete(uint32_t extent, uint32_t plane);
  void found_bad(uint32_t extent, uint64_t shards);   // bytes of them fail a check
  bool drop_liars(uint32_t extent, uint32_t plane);
  bool digests_hold(uint32_t extent, uint32_t plane) const;
  bool locate(uint32_t extent, uint32_t plane);
  bool holds_from(uint32_t extent, uint32_t plane, uint64_t shards);
  void judge(uint32_t extent, uint32_t plane, Todo& todo);   // what else must be read, or is it hopeless
  void free_parity(PlaneWork& work, uint32_t extent, uint32_t plane);
  void hash_rebuilt(uint32_t extent, uint32_t plane, uint64_t shards);

  void run(Todo& todo);
  void ask_late(std::vector<Late> late);
  void cut_at(uint32_t extent);
  template <class F>
  void in_order(uint32_t extents, F&& ask) const {   // ask(extent, plane), in the order in which items are asked
    for (uint32_t i = 0; i < extents * plane_count_; i++)
      plan_.by_plane ? ask(i % extents, i / extents) : ask(i / plane_count_, i % plane_count_);
  }
  // READs of items [first, end) of the stream, as sent.
  std::vector<uint8_t> read_frames(Stream& stream, uint32_t first, uint32_t end) const;
  uint32_t place_in_order(const Stream::Item& item) const {
    return plan_.by_plane ? item.plane * uint32_t(plan_.extents.size()) + item.extent : item.extent * plane_count_ + item.plane;
  }
  bool is_granted(const Stream::Item& item) const { return place_in_order(item) < granted_.load(); }   // it may be asked for
  uint32_t may_ask(const Stream& stream, uint32_t from) const;   // items of it, leading ones; `from` of them may be asked already
  void settle(Stream& stream, uint32_t end);                     // items before `end` came or will not
  void grant_more();                                             // with the job's lock
  void grant(uint32_t pairs);                                    // likewise
  void grant_if_still(int64_t now);                              // by tick()
  void launch(const std::vector<std::shared_ptr<Stream>>& streams, bool fresh = false);
  void tick();
  void arm_tick(Loop& loop);
  void leave();   // one thread fewer inside a place

  const std::shared_ptr<LoadShared> shared_;
  const LoadPlan plan_;
  const uint32_t k_, m_, plane_count_;
  std::vector<std::unique_ptr<ExtentWork>> work_;
  std::vector<std::vector<int32_t>> stream_;   // by extent, shard: its stream; -1: not asked at first

  mutable std::mutex mutex_;                  // guards what follows, but for the atomics
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<ReadConn>> conns_;
  std::vector<uint8_t> done_;                 // by extent, plane
  std::vector<uint32_t> plane_done_;          // extents before cut_ of which the plane is complete
  bool ended_ = false, cancelled_ = false;
  std::atomic<uint32_t> cut_;                 // extents still promised
  std::atomic<uint32_t> inside_{0};           // threads inside a place
  std::vector<uint64_t> ends_;                // bytes of the first 1, 2, ... (extent, plane) in the order of asking; empty: all is asked at once
  std::atomic<uint32_t> granted_{UINT32_MAX}; // so many may be asked
  std::atomic<uint64_t> settled_bytes_{0}, grant_at_{UINT64_MAX};   // what came; and with how much more may be asked
  bool was_still_ = false;                    // nothing came for a while
  uint64_t still_bytes_ = 0;                  // of tick() alone: what had come, and since when nothing more has
  int64_t still_since_ns_ = 0;
  std::atomic<bool> over_{false};
};

}  // namespace kv::client
