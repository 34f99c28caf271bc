// RDMA for both ends of a bulk connection: docs/PROTOCOL.md (RDMA) is the text. libibverbs is opened at run time; hosts without it use TCP.
//
//   Device      one port of one device: its address (GID), protection domain, what it can do
//   Region      memory registered with a device (pinned)
//   Endpoint    a reliable queue pair with its completion queue and channel; nothing of it waits but the constructor, connect() and reset()
//   ZonePool    registered memory, cut into landing zones
//   Landing     a client's endpoint and its landing zone, which it fences (below)
//   Worker      one thread for what may wait on a device or on the kernel
//   SetUps      some threads for what may wait on the way to a peer, which the peer names
//
// Fence: a zone is writable by one queue pair, and returns to its pool only after that pair was reset (no packet is taken any more once
// ibv_modify_qp has returned) and its window or registration is gone. Where the device refuses, the zone is never used again.
// Values of a peer are checked by valid_peer() before a device sees them. Everything here is thread-safe where it says so, else one thread's.
#pragma once
#include <infiniband/verbs.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pages.hpp"
#include "verbs_route.hpp"
#include "wire.hpp"

namespace kv::verbs {

// Why RDMA could not be had; `code` is one of docs/RDMA.md: E145 no library, E146 no device, E147 locked memory, E148 the device refuses,
// E149 no GID of the index that was asked for.
class Fault final : public std::exception {
 public:
  Fault(const char* c, std::string where, std::string why, std::string mend = "");
  const char* what() const noexcept override { return text_.c_str(); }   // one line
  const char* const code;
  const std::string place, cause, fix;
  bool of_setting() const { return std::string_view(code) == "E149"; }   // no other host or moment would mend it: told even where TCP would do

 private:
  std::string text_;
};

struct Library;   // verbs.cpp: functions of libibverbs
const Library& library();   // E145 where it cannot be opened; any thread

class Device {
 public:
  // "auto": the first with an active port and such a GID. E145, E146, E149.
  static std::shared_ptr<Device> open(const std::string& name, const Route& route = {});
  ~Device();
  Device(const Device&) = delete;

  std::string name;
  uint8_t port = 1;
  uint8_t gid_index = 0, traffic_class = 0;
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  bool windows = false;    // has memory windows of type 2
  bool software = false;   // soft-RoCE: slow enough to need long timeouts
  uint32_t wr_max = 0, sge_max = 0, cqe_max = 0;
  uint64_t message_bytes_max = 0;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  std::atomic<int64_t> registered_bytes{0}, queue_pairs{0}, lost_bytes{0};   // lost: zones that could not be fenced

 private:
  Device() = default;
};

// A part of a dma-buf: `bytes` from `offset` on, which work requests and peers call by `address`. Both have one place within a page.
struct DmaBuf { int fd; uint64_t offset, bytes, address; };

class Region {
 public:
  // access: IBV_ACCESS_* bits. E147, E148. Takes time with the size: not on a path that somebody waits for.
  Region(std::shared_ptr<Device> device, void* at, uint64_t bytes, int access, ibv_pd* pd = nullptr);
  // Of that part of a dma-buf alone. E148, also where library, kernel or device know none.
  static std::unique_ptr<Region> of_dma_buf(std::shared_ptr<Device> device, const DmaBuf& part, int access, ibv_pd* pd = nullptr);
  ~Region();
  Region(const Region&) = delete;
  bool close();   // false: the device refuses
  ibv_mr* mr() const { return mr_; }
  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }

 private:
  Region(std::shared_ptr<Device> device, ibv_mr* mr, uint64_t bytes);
  std::shared_ptr<Device> device_;
  ibv_mr* mr_ = nullptr;
  int64_t bytes_ = 0;
};

// Fields in range, reserved ones zero. `zone`: those of the landing zone, as in a request; else they have to be zero.
bool valid_peer(const wire::VerbsOpen& peer, bool zone);

struct Depths { uint32_t sends, receives, send_sges = 1; };

class Endpoint {
 public:
  // `access`: what the peer may do: IBV_ACCESS_REMOTE_WRITE, or 0. E148.
  Endpoint(std::shared_ptr<Device> device, const Depths& depths, int access, ibv_pd* pd = nullptr);
  ~Endpoint();   // resets it, if nobody has
  Endpoint(const Endpoint&) = delete;

  wire::VerbsOpen address() const;   // zone and credits zero
  // To RTS. False with `why`. The kernel may look for the peer's link address for a second: not on a loop that others share.
  bool connect(const wire::VerbsOpen& peer, std::string& why);
  int fd() const { return channel_->fd; }   // readable when completions have come; not blocking
  // Takes what made fd() readable and asks for the next: call it first, then poll() until it gives nothing. False: the queue is broken.
  bool listen();
  int poll(ibv_wc* into, int room);    // how many; -1: the queue is broken
  bool post_receives(uint32_t count);  // without memory: they take immediates only
  bool post_send(ibv_send_wr* chain);  // false: the queue is full or broken, and some of the chain may be posted
  bool reset();                        // nothing is sent or taken any more. False: the device refuses. Idempotent
  ibv_qp* qp() const { return qp_; }
  const Depths depths;

 private:
  void destroy();
  std::shared_ptr<Device> device_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  uint32_t psn_ = 0;
  int access_ = 0;
  bool reset_ = false, reset_fine_ = false;
};

// Zones of one size, in slabs that are registered when first needed. Any thread.
class ZonePool : public std::enable_shared_from_this<ZonePool> {
 public:
  // At most `bytes_max`, but one zone in any case. Nothing is registered yet.
  ZonePool(std::shared_ptr<Device> device, uint64_t zone_bytes, uint64_t bytes_max, bool windows);
  void prepare();          // registers the first slab; without windows for a moment, to see that it can be. E147, E148
  struct Zone { uint8_t* at = nullptr; Region* region = nullptr; };   // region: null without windows
  bool take(Zone& zone);   // false: all in use. E147, E148
  void give(const Zone& zone);
  const std::shared_ptr<Device> device;
  const uint64_t zone_bytes;
  const bool windows;

 private:
  void grow_locked();
  struct Slab { std::unique_ptr<Pages> memory; std::unique_ptr<Region> region; };
  const uint64_t zones_max_;
  std::mutex mutex_;
  std::vector<Slab> slabs_;
  uint64_t zones_ = 0;
  std::vector<Zone> free_;
};

class Landing {
 public:
  // E148, or null with all zones in use.
  static std::unique_ptr<Landing> create(std::shared_ptr<ZonePool> pool, uint32_t credits);
  ~Landing();   // fences the zone: waits on the device
  Landing(const Landing&) = delete;
  // Connects, posts `credits` receives and opens the zone to the peer; opened when a completion of wr_id BIND comes (or at once: bound()).
  bool connect(const wire::VerbsOpen& peer, std::string& why);
  wire::VerbsOpen address() const;   // zone and credits filled in
  uint8_t* zone() const { return zone_.at; }
  uint64_t zone_bytes() const { return pool_->zone_bytes; }
  bool by_window() const { return pool_->windows; }
  Endpoint& endpoint() { return *endpoint_; }
  static constexpr uint64_t BIND = ~uint64_t(0);

 private:
  explicit Landing(std::shared_ptr<ZonePool> pool) : pool_(std::move(pool)) {}
  const std::shared_ptr<ZonePool> pool_;
  ZonePool::Zone zone_;
  ibv_pd* pd_ = nullptr;               // its own, without windows
  std::unique_ptr<Region> region_;     // likewise
  std::unique_ptr<Endpoint> endpoint_;
  ibv_mw* window_ = nullptr;
  uint32_t rkey_ = 0, credits_ = 0;
};

// What may wait runs here in order. Any thread.
class Worker {
 public:
  ~Worker() { stop(); }
  void run(std::function<void()> task);   // after stop(): at once, on the caller's thread
  void stop();                            // runs what is queued, joins

 private:
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;                    // started by the first task
};

// Tasks that may each wait a second because a peer wants it so: of each host one at a time, in order; of several hosts at once. So a host
// keeps itself waiting, not others. Any thread.
class SetUps {
 public:
  ~SetUps() { stop(); }
  void run(const std::string& host, std::function<void()> task);   // after stop(): not at all
  void stop();                            // what is not begun is dropped; joins

 private:
  static constexpr size_t THREADS = 8;    // started when there is something for them
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::deque<std::function<void()>>> hosts_;   // with tasks waiting or running
  std::deque<std::string> turns_;         // of them, in order: those of which none is running
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kv::verbs
