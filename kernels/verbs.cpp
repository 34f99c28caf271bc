// libibverbs: devices, memory, queue pairs. See verbs.hpp; landing zones are in verbs_zone.cpp.
#include "verbs.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "verbs_library.hpp"

namespace kv::verbs {

Fault::Fault(const char* c, std::string where, std::string why, std::string mend)
    : code(c), place(std::move(where)), cause(std::move(why)), fix(std::move(mend)), text_(place + ": " + cause + (fix.empty() ? "" : ". Fix: " + fix)) {}

namespace {
std::string error_text(int error) { return std::generic_category().message(error); }

template <class F>
void find(void* handle, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (!function) throw Fault("E145", "RDMA", std::string("libibverbs.so.1 has no ") + name, "install a newer rdma-core");
}

Library open_library() {
  void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw Fault("E145", "RDMA", "libibverbs.so.1 is not there", "install it (Debian: libibverbs1, ibverbs-providers), or use TCP");
  Library lib{};
  find(handle, lib.get_device_list, "ibv_get_device_list");
  find(handle, lib.free_device_list, "ibv_free_device_list");
  find(handle, lib.open_device, "ibv_open_device");
  find(handle, lib.close_device, "ibv_close_device");
  find(handle, lib.query_device, "ibv_query_device");
  find(handle, lib.query_gid_table, "_ibv_query_gid_table");
  find(handle, lib.alloc_pd, "ibv_alloc_pd");
  find(handle, lib.dealloc_pd, "ibv_dealloc_pd");
  find(handle, lib.reg_mr, "ibv_reg_mr");
  find(handle, lib.dereg_mr, "ibv_dereg_mr");
  find(handle, lib.create_comp_channel, "ibv_create_comp_channel");
  find(handle, lib.destroy_comp_channel, "ibv_destroy_comp_channel");
  find(handle, lib.create_cq, "ibv_create_cq");
  find(handle, lib.destroy_cq, "ibv_destroy_cq");
  find(handle, lib.get_cq_event, "ibv_get_cq_event");
  find(handle, lib.ack_cq_events, "ibv_ack_cq_events");
  find(handle, lib.get_async_event, "ibv_get_async_event");
  find(handle, lib.ack_async_event, "ibv_ack_async_event");
  find(handle, lib.create_qp, "ibv_create_qp");
  find(handle, lib.modify_qp, "ibv_modify_qp");
  find(handle, lib.destroy_qp, "ibv_destroy_qp");
  find(handle, lib.fork_init, "ibv_fork_init");
  lib.fork_init();   // older kernels would copy registered pages in the parent after a fork
  return lib;        // never closed: it would take its providers' threads and locks along
}

// As ibv_query_port, which is inline and would need the library at link time.
bool query_port(ibv_context* context, uint8_t port, ibv_port_attr& attr) {
  attr = {};
  verbs_context* more = verbs_get_ctx_op(context, query_port);
  return more && more->query_port(context, port, &attr, sizeof attr) == 0;
}

bool mapped_v4(const ibv_gid& gid) {
  static constexpr uint8_t FRONT[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(FRONT, FRONT + 12, gid.raw);
}

// What is routed comes first: RoCE v2 of an IPv4 address, of an IPv6 address, link-local ones; then InfiniBand's and RoCE v1's.
int rank(const ibv_gid_entry& e) {
  if (e.gid_type == IBV_GID_TYPE_ROCE_V2) {
    if (mapped_v4(e.gid)) return 4;
    return e.gid.raw[0] == 0xfe && (e.gid.raw[1] & 0xc0) == 0x80 ? 2 : 3;
  }
  return 1;
}

bool best_gid(const Library& lib, ibv_context* context, uint8_t port, int index, ibv_gid_entry& best) {
  std::vector<ibv_gid_entry> all(1024);
  const ssize_t n = lib.query_gid_table(context, all.data(), all.size(), 0, sizeof(ibv_gid_entry));
  int found = 0;
  for (ssize_t i = 0; i < n; i++) {
    const ibv_gid_entry& each = all[size_t(i)];
    if (each.port_num != port || each.gid_index > 255 || (index != ANY_GID && each.gid_index != uint32_t(index)) || rank(each) <= found) continue;
    best = each;
    found = rank(best);
  }
  return found > 0;
}

bool is_software(const ibv_device_attr& attr) { return attr.vendor_id == 0 || attr.vendor_id == 0xffffff; }   // rxe's
bool has_windows(const ibv_device_attr& attr) { return attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B); }

struct DeviceList {
  const Library& lib;
  int count = 0;
  ibv_device** list;
  explicit DeviceList(const Library& l) : lib(l), list(l.get_device_list(&count)) {
    if (!list) count = 0;
  }
  ~DeviceList() {
    if (list) lib.free_device_list(list);
  }
};
}  // namespace

const Library& library() {
  static const Library lib = open_library();   // throws again at each call until it is there
  return lib;
}

// --- Device ---

std::shared_ptr<Device> Device::open(const std::string& name, const Route& route) {
  const Library& lib = library();
  DeviceList devices(lib);
  std::string seen;   // why each was passed over
  bool lacks_gid = false;
  const std::string gid_text = route.gid_index == ANY_GID ? "address" : "GID " + std::to_string(route.gid_index);
  auto pass = [&seen](const char* device, const std::string& why) { seen += (seen.empty() ? "" : ", ") + std::string(device) + " " + why; };
  for (int i = 0; i < devices.count; i++) {
    ibv_device* candidate = devices.list[i];
    if (name != "auto" && name != candidate->name) continue;
    if (candidate->transport_type != IBV_TRANSPORT_IB) {
      pass(candidate->name, "is neither InfiniBand nor RoCE");
      continue;
    }
    std::shared_ptr<Device> device(new Device);
    device->context = lib.open_device(candidate);
    if (!device->context) {
      pass(candidate->name, "cannot be opened (" + error_text(errno) + ")");
      continue;
    }
    ibv_device_attr attr{};
    if (lib.query_device(device->context, &attr)) {
      pass(candidate->name, "does not answer");
      continue;
    }
    ibv_port_attr port{};
    ibv_gid_entry gid{};
    uint32_t p = 1;
    bool active = false;
    for (; p <= attr.phys_port_cnt; p++) {
      if (!query_port(device->context, uint8_t(p), port) || port.state != IBV_PORT_ACTIVE) continue;
      active = true;
      if (best_gid(lib, device->context, uint8_t(p), route.gid_index, gid)) break;
    }
    if (p > attr.phys_port_cnt) {
      lacks_gid |= active && route.gid_index != ANY_GID;
      pass(candidate->name, active ? "has no " + gid_text + " on an active port" : "has no active port");
      continue;
    }
    device->name = candidate->name;
    device->port = uint8_t(p);
    device->gid_index = uint8_t(gid.gid_index);
    device->traffic_class = route.traffic_class;
    std::copy(std::begin(gid.gid.raw), std::end(gid.gid.raw), device->gid.begin());
    device->lid = port.link_layer == IBV_LINK_LAYER_ETHERNET ? 0 : port.lid;
    device->mtu = port.active_mtu;
    device->windows = has_windows(attr);
    device->software = is_software(attr);
    device->wr_max = uint32_t(attr.max_qp_wr);
    device->sge_max = uint32_t(attr.max_sge);
    device->cqe_max = uint32_t(attr.max_cqe);
    device->message_bytes_max = port.max_msg_sz;
    device->pd = lib.alloc_pd(device->context);
    if (!device->pd) {
      pass(candidate->name, "gives no protection domain (" + error_text(errno) + ")");
      continue;
    }
    fcntl(device->context->async_fd, F_SETFL, fcntl(device->context->async_fd, F_GETFL) | O_NONBLOCK);
    return device;
  }
  if (lacks_gid) throw Fault("E149", "RDMA GID index " + std::to_string(route.gid_index), seen, "kvstore doctor lists GIDs; auto chooses one");
  const bool any = name == "auto";
  const std::string none = any ? "this host has no device" : "there is no such device";
  const char* fix = "kvstore doctor lists devices; for TCP: transport tcp, of a node --rdma-device off";
  throw Fault("E146", any ? "RDMA" : "RDMA device " + name, seen.empty() ? none : seen, fix);
}

Device::~Device() {
  const Library& lib = library();
  if (pd) lib.dealloc_pd(pd);
  if (context) lib.close_device(context);
}

// --- Region ---

Region::Region(std::shared_ptr<Device> device, void* at, uint64_t bytes, int access, ibv_pd* pd) : device_(std::move(device)) {
  mr_ = library().reg_mr(pd ? pd : device_->pd, at, bytes, access);
  if (!mr_) {
    const int error = errno;
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string what = "registering " + std::to_string(bytes >> 10) + " KiB with " + device_->name;
    if ((error == ENOMEM || error == EPERM || error == EAGAIN) && limit.rlim_cur != RLIM_INFINITY)
      throw Fault("E147", what, "may lock " + std::to_string(limit.rlim_cur >> 10) + " KiB of memory, this process's limit",
                  "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)");
    throw Fault("E148", what, error_text(error), "fewer or smaller pools, or use TCP");
  }
  bytes_ = int64_t(bytes);
  device_->registered_bytes += bytes_;
}

Region::Region(std::shared_ptr<Device> device, ibv_mr* mr, uint64_t bytes) : device_(std::move(device)), mr_(mr), bytes_(int64_t(bytes)) {
  device_->registered_bytes += bytes_;
}

namespace {
// Not in every libibverbs that serves otherwise: rdma-core has it from 34 on.
using RegDmaBuf = ibv_mr* (*)(ibv_pd*, uint64_t offset, size_t length, uint64_t address, int fd, int access);
RegDmaBuf reg_dma_buf() {
  void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);   // open already: one more reference to it, never given back
  return handle ? reinterpret_cast<RegDmaBuf>(dlsym(handle, "ibv_reg_dmabuf_mr")) : nullptr;
}
}  // namespace

std::unique_ptr<Region> Region::of_dma_buf(std::shared_ptr<Device> device, const DmaBuf& part, int access, ibv_pd* pd) {
  const std::string what = "registering a dma-buf with " + device->name;
  const RegDmaBuf reg = reg_dma_buf();
  if (!reg) throw Fault("E148", what, "libibverbs.so.1 has no ibv_reg_dmabuf_mr", "rdma-core 34 or later, or nvidia-peermem");
  ibv_mr* mr = reg(pd ? pd : device->pd, part.offset, part.bytes, part.address, part.fd, access);
  if (!mr) throw Fault("E148", what, error_text(errno), "another kernel or driver of the device, or nvidia-peermem");
  return std::unique_ptr<Region>(new Region(std::move(device), mr, part.bytes));
}

bool Region::close() {
  if (!mr_) return true;
  if (library().dereg_mr(mr_)) return false;
  mr_ = nullptr;
  device_->registered_bytes -= bytes_;
  return true;
}

Region::~Region() { close(); }

// --- Endpoint ---

bool valid_peer(const wire::VerbsOpen& p, bool zone) {
  if (p.qpn > 0xffffff || p.psn > 0xffffff || p.mtu < IBV_MTU_256 || p.mtu > IBV_MTU_4096 || p.zero || p.zero2) return false;
  if (p.gid[0] == 0xff || std::all_of(std::begin(p.gid), std::end(p.gid), [](uint8_t b) { return b == 0; })) return false;   // no unicast
  if (!zone) return !p.credits && !p.zone_addr && !p.zone_bytes && !p.rkey;
  return p.credits >= 1 && p.credits <= wire::VERBS_CREDITS_MAX && p.zone_bytes >= 1 && p.zone_bytes <= wire::VERBS_ZONE_BYTES_MAX &&
         p.zone_addr <= ~uint64_t(0) - p.zone_bytes;
}

Endpoint::Endpoint(std::shared_ptr<Device> device, const Depths& d, int access, ibv_pd* pd)
    : depths{std::min(d.sends, device->wr_max), std::min(d.receives, device->wr_max), std::min(d.send_sges, device->sge_max)},
      device_(std::move(device)),
      access_(access) {
  const Library& lib = library();
  ibv_async_event event;   // what happened to ports and to others' queues: nobody here waits for it, and it must not pile up
  while (lib.get_async_event(device_->context, &event) == 0) lib.ack_async_event(&event);
  auto need = [this](bool fine, const char* what) {
    if (fine) return;
    const int error = errno;
    destroy();
    throw Fault("E148", device_->name + ": " + what, error_text(error), "fewer connections, or use TCP");
  };
  uint32_t random = 0;
  if (getrandom(&random, sizeof random, 0) != ssize_t(sizeof random)) random = uint32_t(reinterpret_cast<uintptr_t>(this) >> 6);
  psn_ = random & 0xffffff;
  channel_ = lib.create_comp_channel(device_->context);
  need(channel_, "completion channel");
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  cq_ = lib.create_cq(device_->context, int(std::min(depths.sends + depths.receives + 1, device_->cqe_max)), nullptr, channel_, 0);
  need(cq_, "completion queue");
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = depths.sends;
  init.cap.max_recv_wr = std::max(depths.receives, 1u);
  init.cap.max_send_sge = depths.send_sges;
  init.cap.max_recv_sge = 1;
  qp_ = lib.create_qp(pd ? pd : device_->pd, &init);
  need(qp_, "queue pair");
  device_->queue_pairs++;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = device_->port;
  attr.qp_access_flags = unsigned(access_);
  const int error = lib.modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error) errno = error;
  need(!error && !ibv_req_notify_cq(cq_, 0), "queue pair to INIT");
}

wire::VerbsOpen Endpoint::address() const {
  wire::VerbsOpen out{};
  std::copy(device_->gid.begin(), device_->gid.end(), out.gid);
  out.qpn = qp_->qp_num;
  out.psn = psn_;
  out.mtu = uint8_t(device_->mtu);
  out.lid = device_->lid;
  return out;
}

bool Endpoint::connect(const wire::VerbsOpen& peer, std::string& why) {
  const Library& lib = library();
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = std::min(device_->mtu, ibv_mtu(peer.mtu));
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 12;   // 0.64 ms
  attr.ah_attr.is_global = 1;
  std::copy(std::begin(peer.gid), std::end(peer.gid), attr.ah_attr.grh.dgid.raw);
  attr.ah_attr.grh.sgid_index = device_->gid_index;
  attr.ah_attr.grh.hop_limit = 64;
  attr.ah_attr.grh.traffic_class = device_->traffic_class;
  attr.ah_attr.dlid = peer.lid;
  attr.ah_attr.port_num = device_->port;
  int error = lib.modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                            IBV_QP_MIN_RNR_TIMER);
  if (error) return why = "queue pair to RTR: " + error_text(error), false;
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = psn_;
  attr.timeout = device_->software ? 18 : 14;   // 1.1 s, 67 ms
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;   // for ever
  attr.max_rd_atomic = 1;
  error = lib.modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error) return why = "queue pair to RTS: " + error_text(error), false;
  return true;
}

bool Endpoint::listen() {
  const Library& lib = library();
  ibv_cq* cq;
  void* context;
  unsigned events = 0;
  while (lib.get_cq_event(channel_, &cq, &context) == 0) events++;
  if (events) lib.ack_cq_events(cq_, events);
  return ibv_req_notify_cq(cq_, 0) == 0;
}

int Endpoint::poll(ibv_wc* into, int room) { return std::max(ibv_poll_cq(cq_, room, into), -1); }

bool Endpoint::post_receives(uint32_t count) {
  constexpr uint32_t BATCH = 64;
  ibv_recv_wr wr[BATCH];
  while (count) {
    const uint32_t n = std::min(count, BATCH);
    for (uint32_t i = 0; i < n; i++) {
      wr[i] = {};
      wr[i].next = i + 1 < n ? &wr[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(qp_, wr, &bad)) return false;
    count -= n;
  }
  return true;
}

bool Endpoint::post_send(ibv_send_wr* chain) {
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp_, chain, &bad) == 0;
}

bool Endpoint::reset() {
  if (reset_) return reset_fine_;
  reset_ = true;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  reset_fine_ = !qp_ || library().modify_qp(qp_, &attr, IBV_QP_STATE) == 0;
  return reset_fine_;
}

void Endpoint::destroy() {
  const Library& lib = library();
  bool gone = false;
  if (qp_) {
    reset();
    gone = lib.destroy_qp(qp_) == 0;
  }
  if (cq_) {
    if (channel_) listen();   // events that were not taken would keep the queue
    lib.destroy_cq(cq_);
  }
  if (channel_) lib.destroy_comp_channel(channel_);
  qp_ = nullptr;
  cq_ = nullptr;
  channel_ = nullptr;
  if (gone) device_->queue_pairs--;   // last: none counted, none held
}

Endpoint::~Endpoint() { destroy(); }

// --- Worker ---

void Worker::run(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) {
      tasks_.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
      changed_.notify_one();
      return;
    }
  }
  task();
}

void Worker::loop() {
  pthread_setname_np(pthread_self(), "kv-verbs");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;   // what it held may wait on the device, too
    lock.lock();
  }
}

void Worker::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

// --- SetUps ---

void SetUps::run(const std::string& host, std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  auto [at, fresh] = hosts_.try_emplace(host);
  at->second.push_back(std::move(task));
  if (!fresh) return;   // its turn comes when what runs of it is over
  turns_.push_back(host);
  if (threads_.size() < THREADS) threads_.emplace_back([this] { loop(); });
  changed_.notify_one();
}

void SetUps::loop() {
  pthread_setname_np(pthread_self(), "kv-verbs-open");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !turns_.empty(); });
    if (stopping_) return;
    const std::string host = std::move(turns_.front());
    turns_.pop_front();
    auto task = std::move(hosts_[host].front());
    hosts_[host].pop_front();
    lock.unlock();
    task();
    task = nullptr;   // what it held may wait on the device, too
    lock.lock();
    if (hosts_[host].empty()) hosts_.erase(host);
    else turns_.push_back(host);   // for this thread, or one that is awake
  }
}

void SetUps::stop() {
  std::vector<std::thread> threads;
  decltype(hosts_) dropped;   // what the tasks hold goes without the lock
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& host : turns_) dropped.insert(hosts_.extract(host));
    turns_.clear();
    threads.swap(threads_);
    changed_.notify_all();
  }
  for (auto& thread : threads) thread.join();
  hosts_.clear();             // of those whose task ran
}

}  // namespace kv::verbs
