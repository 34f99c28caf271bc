// Connections of a client: event loops, nodes and what is known of their health, and the part that all connections share.
//
// Threads: each connection belongs to one Loop and is read and closed by that thread alone. What other threads may do (queue bytes,
// send them at once) is guarded by the connection's mutex. Lock order: node, then connection; call or job last.
#pragma once
#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "verbs_route.hpp"
#include "wire.hpp"

namespace kv::verbs {
class Worker;
class ZonePool;
}  // namespace kv::verbs

namespace kv::client {

inline constexpr int64_t MS = 1'000'000, SECOND = 1'000'000'000;
inline constexpr int64_t SILENT_NS = 500 * MS;
int64_t now_ns();   // monotonic

// What ended a request without an answer; beside the numbers of Status, which a daemon answered.
enum class Fault : uint32_t {
  UNREACHABLE = 100,   // no connection could be made, or the node is held for down
  BROKEN = 101,        // the connection ended, or the peer broke the protocol
  STALLED = 102,       // nothing came for too long
  LIMIT = 103,         // a limit of this client
  CANCELLED = 104,     // the caller gave up
};
using Outcome = uint32_t;   // a Status or a Fault
inline constexpr Outcome outcome(Fault f) { return uint32_t(f); }
inline constexpr Outcome outcome(Status s) { return uint32_t(s); }

enum class Transport : uint8_t { TCP, AUTO, RDMA };   // of reads; AUTO: RDMA where both ends can

struct NetConfig {
  wire::Role small_role = wire::Role::SMALL;   // DIRECTORY where the peers are window directories
  uint32_t loops = 2;                       // threads of reads, and as many of writes; small messages have one of their own
  uint32_t bulk_connections_max = 2048;
  int64_t connect_timeout_ns = 1 * SECOND;
  int64_t stall_timeout_ns = 3 * SECOND;    // nothing heard while something is owed: the connection is half open
  int64_t plane_wait_ns = 2 * MS;           // a load by plane to which nothing more came for so long asks for the next plane
  int64_t drain_timeout_ns = 1 * SECOND;    // an unread rest after a load
  uint64_t drain_bytes_max = 8u << 20;      // a longer rest is not worth reading: the connection is closed
  int64_t idle_timeout_ns = 60 * SECOND;
  int64_t backoff_min_ns = 250 * MS, backoff_max_ns = 5 * SECOND;
  std::string congestion_control;           // of TCP; "": the host's
  std::array<uint8_t, 16> cluster{};
  uint64_t epoch = 0;
  Transport transport = Transport::TCP;
  std::string rdma_device = "auto";
  verbs::Route rdma_route;
  uint64_t rdma_zone_bytes = 4u << 20;      // of a connection's landing zone
  uint64_t rdma_pool_bytes = 256u << 20;    // of all landing zones
  uint32_t rdma_credits = 256;              // items that may be on their way to one connection
  bool rdma_windows = true;                 // where the device has them
  int64_t rdma_retry_ns = 60 * SECOND;      // TCP for so long to a node that RDMA did not work with
};

// Latencies seen lately and the delay after which an answer counts as late. Any thread.
class Learnt {
 public:
  Learnt(int64_t floor_ns, int64_t ceiling_ns, double factor) : floor_(floor_ns), ceiling_(ceiling_ns), factor_(factor), delay_(4 * floor_ns) {}
  void add(int64_t ns);
  int64_t delay() const { return delay_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t KEPT = 256;
  const int64_t floor_, ceiling_;
  const double factor_;
  std::mutex mutex_;
  std::array<int64_t, KEPT> ring_{};
  size_t count_ = 0;
  std::atomic<int64_t> delay_;
};

class Conn;
class SmallConn;
class ReadConn;
class WriteConn;

class Loop {
 public:
  enum class Kind : uint8_t { SMALL, READS, WRITES };
  explicit Loop(Kind kind = Kind::SMALL);
  ~Loop();
  Loop(const Loop&) = delete;
  void stop();                                  // joins; connections are closed on the loop's thread first
  void post(std::function<void()> task);        // any thread
  bool here() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Loop thread only.
  void add(std::shared_ptr<Conn> conn);
  void remove(uint64_t conn_id);                // destroyed after this round of events
  void at(int64_t when_ns, std::function<void()> task);
  int epoll() const { return epoll_; }
  bool watch(int fd, uint64_t conn_id);         // a second descriptor of a connection: tells its on_side()
  void unwatch(int fd);

 private:
  struct Timer {
    int64_t when;
    uint64_t order;
    std::function<void()> task;
    bool operator<(const Timer& o) const { return when != o.when ? when > o.when : order > o.order; }
  };
  void run(Kind kind);
  void wake_locked();
  void run_posted();
  int64_t run_timers();   // when the next is due
  bool sweep(int64_t now);

  int epoll_ = -1, wake_ = -1;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  std::atomic<bool> any_posted_{false};
  bool stopping_ = false;
  std::priority_queue<Timer> timers_;
  uint64_t timer_order_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Conn>> conns_;
  std::vector<std::shared_ptr<Conn>> retired_;
  std::thread thread_;
};

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};
// "1.2.3.4:7400" or "[::1]:7400"; std::invalid_argument for anything else.
Address parse_address(const std::string& text);

struct Node {
  uint32_t index = 0;
  Address address;
  std::mutex mutex;                       // guards the connections below and failures
  std::shared_ptr<SmallConn> small;
  std::shared_ptr<WriteConn> write;
  std::vector<std::shared_ptr<ReadConn>> idle;
  uint32_t failures = 0;
  std::atomic<int64_t> down_until_ns{0};
  std::atomic<int64_t> tcp_until_ns{0};   // RDMA did not work with it
  std::atomic<int64_t> late_since_ns{0};  // an answer is owed and was late; ends with the next byte heard

  bool down(int64_t now) const { return now < down_until_ns.load(std::memory_order_relaxed); }
  bool late() const { return late_since_ns.load(std::memory_order_relaxed) != 0; }
  // 0: healthy. 1: owes an answer that is late. 2: has been late for so long that nobody should wait for it. 3: held for down.
  uint8_t health(int64_t now) const {
    const int64_t since = late_since_ns.load(std::memory_order_relaxed);
    return down(now) ? 3 : since == 0 ? 0 : now - since < SILENT_NS ? 1 : 2;
  }
  void heard() {
    if (late_since_ns.load(std::memory_order_relaxed)) late_since_ns.store(0, std::memory_order_relaxed);
  }
  void mark_late(int64_t now) {
    int64_t none = 0;
    late_since_ns.compare_exchange_strong(none, now);
  }
};

struct NetStats {
  std::atomic<uint64_t> connects{0}, connect_failures{0}, connections_broken{0}, connections_stalled{0}, bytes_received{0}, bytes_sent{0},
      protocol_errors{0}, read_bytes_tcp{0}, read_bytes_rdma{0}, rdma_connections{0}, rdma_fallbacks{0}, rdma_faults{0};
  std::atomic<int64_t> connections{0}, bulk_connections{0};
};

// Everything that connections of one client share.
class Net {
 public:
  Net(const NetConfig& config, const std::vector<std::string>& addresses);
  ~Net();
  const NetConfig config;
  NetStats stats;
  Learnt discover_delay{3 * MS, 100 * MS, 4.0}, promise_delay{3 * MS, 100 * MS, 4.0}, small_delay{3 * MS, 100 * MS, 4.0};
  std::vector<std::unique_ptr<Node>> nodes;
  std::unique_ptr<Loop> small_loop;
  std::vector<std::unique_ptr<Loop>> bulk_loops, write_loops;

  uint64_t next_id() { return ids_.fetch_add(1, std::memory_order_relaxed); }
  std::atomic<uint64_t> newest_epoch{0};   // of the cluster map, that any node has named
  void heard_epoch(uint64_t epoch) {
    uint64_t known = newest_epoch.load(std::memory_order_relaxed);
    while (known < epoch && !newest_epoch.compare_exchange_weak(known, epoch, std::memory_order_relaxed)) {}
  }
  Loop& bulk_loop(uint32_t node) { return *bulk_loops[node % bulk_loops.size()]; }
  Loop& write_loop(uint32_t node) { return *write_loops[node % write_loops.size()]; }
  void failed(Node& node);      // a connection could not be made or went silent: held for down for a while, longer each time
  void succeeded(Node& node);
  void stop();

  // RDMA. Null `zones`: TCP. Any thread.
  std::shared_ptr<verbs::ZonePool> zones;
  std::unique_ptr<verbs::Worker> worker;    // for what waits on a device
  std::atomic<int64_t> rdma_after_ns{0};    // no landing zone could be had: not before this
  bool rdma_to(const Node& node) const;
  struct Notice { bool warn; std::string text; };
  void notice(const std::string& kind, bool warn, const std::string& text);   // for the log; once for each kind
  std::vector<Notice> take_notices();

 private:
  void open_device();
  std::atomic<uint64_t> ids_{1};
  std::mutex notices_mutex_;
  std::set<std::string> told_;
  std::vector<Notice> notices_;
};

// One TCP connection: connect, HELLO, an out-queue of small frames. What comes in is the business of the class below it.
class Conn : public std::enable_shared_from_this<Conn> {
 public:
  enum class State : uint8_t { NEW, CONNECTING, OPEN, CLOSED };
  Conn(Net& net, Node& node, Loop& loop, wire::Role role);
  virtual ~Conn();
  Conn(const Conn&) = delete;

  void open();                          // loop thread; ends in on_closed when it fails
  void close(Outcome why);              // loop thread
  void on_events(uint32_t events);      // loop thread
  virtual void on_side() {}             // loop thread: of a descriptor that watch() added
  virtual bool on_sweep(int64_t now);   // loop thread, now and then; true while something is owed
  State state() const { return state_.load(std::memory_order_acquire); }

  const uint64_t id;
  Net& net;
  Node& node;
  Loop& loop;

 protected:
  virtual void on_open() {}             // connected; HELLO is on its way
  virtual void on_read() = 0;           // HELLO has been answered
  virtual bool has_more() { return false; }   // more to send than the out-queue
  virtual void send_more() {}
  virtual void on_closed(Outcome why) = 0;

  bool flush_locked();                  // sends the out-queue; false when the connection broke
  void listen_locked();                 // tells epoll what is waited for
  ssize_t receive(void* into, size_t bytes, int flags = 0);    // as recv, -1 with EAGAIN; 0 at the end of the stream
  void heard(int64_t now) { last_heard_ns_ = now; node.heard(); }
  void broke_protocol();                // closes

  std::mutex mutex_;                    // guards fd_, out_, events_
  int fd_ = -1;
  std::vector<uint8_t> out_;
  size_t out_at_ = 0;
  uint32_t events_ = 0;
  std::atomic<State> state_{State::NEW};
  int64_t opened_ns_ = 0, last_heard_ns_ = 0;
  bool greeted_ = false;

 private:
  bool read_hello();
  const wire::Role role_;
  uint32_t hello_got_ = 0;
  uint8_t hello_[sizeof(wire::FrameHeader) + sizeof(wire::Hello)];
};

wire::FrameHeader request_header(wire::Verb verb, uint64_t request_id, uint32_t body_bytes, uint32_t check);

}  // namespace kv::client
