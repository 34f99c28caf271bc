// See client_net.hpp.
#include "client_net.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "priority.hpp"
#include "tcp.hpp"
#include "verbs.hpp"

namespace kv::client {

namespace {
constexpr int64_t SWEEP_NS = 250 * MS;
constexpr size_t EVENTS_MAX = 64;
constexpr uint64_t SIDE = uint64_t(1) << 63;   // beside a connection's number in an event: its second descriptor
}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * SECOND + t.tv_nsec;
}

Address parse_address(const std::string& text) {
  Address out;
  const size_t colon = text.rfind(':');
  uint16_t port = 0;
  if (colon != std::string::npos) {
    const char* end = text.data() + text.size();
    auto [at, error] = std::from_chars(text.data() + colon + 1, end, port);
    if (error == std::errc() && at == end && port) {
      std::string host = text.substr(0, colon);
      auto* v4 = reinterpret_cast<sockaddr_in*>(&out.storage);
      auto* v6 = reinterpret_cast<sockaddr_in6*>(&out.storage);
      if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        out.bytes = sizeof *v6;
        if (inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &v6->sin6_addr) == 1) return out;
      } else {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        out.bytes = sizeof *v4;
        if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) return out;
      }
    }
  }
  throw std::invalid_argument("address \"" + text + "\" is not ip:port");
}

void Learnt::add(int64_t ns) {
  std::lock_guard lock(mutex_);
  ring_[count_++ % KEPT] = ns;
  if (count_ % 32 && count_ > 32) return;
  std::array<int64_t, KEPT> sorted = ring_;
  const size_t n = std::min(count_, KEPT), at = n * 3 / 4;
  std::nth_element(sorted.begin(), sorted.begin() + at, sorted.begin() + n);
  delay_.store(std::clamp(int64_t(double(sorted[at]) * factor_), floor_, ceiling_), std::memory_order_relaxed);
}

// --- Loop ---

Loop::Loop(Kind kind) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) < 0) {
    const int error = errno;
    if (epoll_ >= 0) ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
    throw std::system_error(error, std::generic_category(), "client event loop");
  }
  thread_ = std::thread([this, kind] { run(kind); });
}

Loop::~Loop() { stop(); }

void Loop::wake_locked() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) {}   // full: it is awake
}

void Loop::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_locked();
  }
  thread_.join();
  ::close(epoll_);
  ::close(wake_);
}

void Loop::post(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  if (posted_.empty()) wake_locked();
  posted_.push_back(std::move(task));
  any_posted_.store(true, std::memory_order_relaxed);
}

void Loop::add(std::shared_ptr<Conn> conn) {
  const uint64_t id = conn->id;
  conns_.emplace(id, std::move(conn));
}

void Loop::remove(uint64_t conn_id) {
  auto found = conns_.find(conn_id);
  if (found == conns_.end()) return;
  retired_.push_back(std::move(found->second));
  conns_.erase(found);
}

void Loop::at(int64_t when_ns, std::function<void()> task) { timers_.push({when_ns, timer_order_++, std::move(task)}); }

bool Loop::watch(int fd, uint64_t conn_id) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = conn_id | SIDE}};
  return epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0;
}

void Loop::unwatch(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

void Loop::run_posted() {
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(posted_);
    any_posted_.store(false, std::memory_order_relaxed);
  }
  for (auto& task : tasks) task();
}

int64_t Loop::run_timers() {
  while (!timers_.empty()) {
    const int64_t now = now_ns();
    if (timers_.top().when > now) return timers_.top().when;
    auto task = std::move(const_cast<Timer&>(timers_.top()).task);
    timers_.pop();
    task();
  }
  return INT64_MAX;
}

bool Loop::sweep(int64_t now) {
  std::vector<std::shared_ptr<Conn>> all;
  all.reserve(conns_.size());
  for (auto& [id, conn] : conns_) all.push_back(conn);
  for (auto& conn : all)
    if (conn->state() != Conn::State::CLOSED) conn->on_sweep(now);
  return !conns_.empty();
}

void Loop::run(Kind kind) {
  if (kind == Kind::WRITES) give_way_to_loads();
  pthread_setname_np(pthread_self(), "kv-client");
  epoll_event events[EVENTS_MAX];
  int64_t next_sweep = 0;
  for (;;) {
    int64_t due = run_timers();
    const int64_t now = now_ns();
    if (now >= next_sweep) next_sweep = sweep(now) ? now + SWEEP_NS : INT64_MAX;
    due = std::min(due, next_sweep);
    retired_.clear();
    timespec wait{}, *timeout = nullptr;
    if (due != INT64_MAX) {
      const int64_t left = std::max<int64_t>(0, due - now_ns());
      wait = {.tv_sec = left / SECOND, .tv_nsec = left % SECOND};
      timeout = &wait;
    }
    const int n = epoll_pwait2(epoll_, events, EVENTS_MAX, timeout, nullptr);
    for (int i = 0; i < n; i++) {
      if (events[i].data.u64 == 0) {
        uint64_t count;
        if (read(wake_, &count, sizeof count) < 0) {}
        continue;
      }
      auto found = conns_.find(events[i].data.u64 & ~SIDE);
      if (found == conns_.end()) continue;
      auto conn = found->second;
      if (events[i].data.u64 & SIDE) conn->on_side();
      else conn->on_events(events[i].events);
      // The next connection may bring a megabyte. Elsewhere what has come is heard first: a call may end with what was posted.
      if (kind == Kind::READS && any_posted_.load(std::memory_order_relaxed)) run_posted();
    }
    bool stopping;
    {
      std::lock_guard lock(mutex_);
      stopping = stopping_;
    }
    run_posted();
    if (next_sweep == INT64_MAX && !conns_.empty()) next_sweep = now_ns() + SWEEP_NS;
    if (stopping) break;
  }
  while (!conns_.empty()) {
    auto conn = conns_.begin()->second;
    conn->close(outcome(Fault::CANCELLED));
    conns_.erase(conn->id);
  }
  retired_.clear();
  while (!timers_.empty()) timers_.pop();
}

// --- Net ---

Net::Net(const NetConfig& c, const std::vector<std::string>& addresses) : config(c) {
  for (const std::string& text : addresses) {
    auto node = std::make_unique<Node>();
    node->index = uint32_t(nodes.size());
    node->address = parse_address(text);
    nodes.push_back(std::move(node));
  }
  open_device();
  small_loop = std::make_unique<Loop>();
  for (uint32_t i = 0; i < c.loops; i++) {
    bulk_loops.push_back(std::make_unique<Loop>(Loop::Kind::READS));
    write_loops.push_back(std::make_unique<Loop>(Loop::Kind::WRITES));
  }
}

Net::~Net() { stop(); }

void Net::stop() {
  for (auto& loop : bulk_loops) loop->stop();
  for (auto& loop : write_loops) loop->stop();
  small_loop->stop();
  if (worker) worker->stop();   // landing zones are fenced and returned
}

void Net::open_device() {
  if (config.transport == Transport::TCP) return;
  auto over_tcp = [this](bool amiss, const std::string& why) {
    zones = nullptr;
    notice("device", amiss, "reads go over TCP: " + why);
  };
  try {
    auto device = verbs::Device::open(config.rdma_device, config.rdma_route);
    zones = std::make_shared<verbs::ZonePool>(std::move(device), config.rdma_zone_bytes, config.rdma_pool_bytes, config.rdma_windows);
    zones->prepare();
    worker = std::make_unique<verbs::Worker>();
  } catch (const verbs::Fault& fault) {
    if (config.transport == Transport::RDMA || fault.of_setting()) throw;
    over_tcp(zones || config.rdma_device != "auto", fault.what());   // that there is no device is no fault
  } catch (const std::bad_alloc&) {
    if (config.transport == Transport::RDMA) throw;
    over_tcp(true, "no memory for landing zones");
  }
}

bool Net::rdma_to(const Node& node) const {
  if (!zones) return false;
  const int64_t now = now_ns();
  return config.transport == Transport::RDMA || (now >= node.tcp_until_ns.load(std::memory_order_relaxed) && now >= rdma_after_ns.load(std::memory_order_relaxed));
}

void Net::notice(const std::string& kind, bool warn, const std::string& text) {
  std::lock_guard lock(notices_mutex_);
  if (told_.insert(kind).second) notices_.push_back({warn, text});
}

std::vector<Net::Notice> Net::take_notices() {
  std::lock_guard lock(notices_mutex_);
  return std::exchange(notices_, {});
}

void Net::failed(Node& node) {
  std::lock_guard lock(node.mutex);
  const int64_t wait = std::min(config.backoff_max_ns, config.backoff_min_ns << std::min(node.failures, 16u));
  node.failures++;
  node.late_since_ns.store(0, std::memory_order_relaxed);
  node.down_until_ns.store(now_ns() + wait, std::memory_order_relaxed);
}

void Net::succeeded(Node& node) {
  std::lock_guard lock(node.mutex);
  node.failures = 0;
  node.down_until_ns.store(0, std::memory_order_relaxed);
}

// --- Conn ---

wire::FrameHeader request_header(wire::Verb verb, uint64_t request_id, uint32_t body_bytes, uint32_t check) {
  wire::FrameHeader h{};
  h.magic = wire::MAGIC;
  h.version = wire::VERSION;
  h.verb = uint8_t(verb);
  h.kind = uint8_t(wire::Kind::REQUEST);
  h.request_id = request_id;
  h.body_bytes = body_bytes;
  h.body_check = check;
  return h;
}

Conn::Conn(Net& n, Node& to, Loop& l, wire::Role role)
    : id(n.next_id()), net(n), node(to), loop(l), role_(role) {
  wire::Hello hello{};
  hello.version_min = hello.version_max = wire::VERSION;
  hello.role = uint8_t(role);
  std::copy(net.config.cluster.begin(), net.config.cluster.end(), hello.cluster);
  hello.epoch = net.config.epoch;
  const auto header = request_header(wire::Verb::HELLO, net.next_id(), sizeof hello, wire::body_check(&hello, sizeof hello));
  out_.resize(sizeof header + sizeof hello);
  std::memcpy(out_.data(), &header, sizeof header);
  std::memcpy(out_.data() + sizeof header, &hello, sizeof hello);
  net.stats.connections++;
}

Conn::~Conn() {
  if (fd_ >= 0) ::close(fd_);
  net.stats.connections--;
}

void Conn::open() {
  if (state() != State::NEW) return;
  loop.add(shared_from_this());
  opened_ns_ = last_heard_ns_ = now_ns();
  net.stats.connects++;
  int error = 0;
  {
    std::lock_guard lock(mutex_);
    fd_ = socket(node.address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ >= 0) {
      const int on = 1;
      setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      set_congestion_control(fd_, net.config.congestion_control);
      if (connect(fd_, reinterpret_cast<const sockaddr*>(&node.address.storage), node.address.bytes) < 0 && errno != EINPROGRESS) error = errno;
      state_.store(State::CONNECTING, std::memory_order_release);
      epoll_event event{.events = events_ = EPOLLOUT, .data = {.u64 = id}};
      if (!error && epoll_ctl(loop.epoll(), EPOLL_CTL_ADD, fd_, &event) < 0) error = errno;
    } else {
      error = errno;
    }
  }
  if (error) close(outcome(error == EMFILE || error == ENFILE ? Fault::LIMIT : Fault::UNREACHABLE));
}

void Conn::close(Outcome why) {
  if (state() == State::CLOSED) return;
  auto self = shared_from_this();
  {
    std::lock_guard lock(mutex_);
    state_.store(State::CLOSED, std::memory_order_release);
    if (fd_ >= 0) ::close(fd_);   // leaves epoll by itself
    fd_ = -1;
  }
  if (why == outcome(Fault::STALLED)) net.stats.connections_stalled++;
  if (why == outcome(Fault::BROKEN)) net.stats.connections_broken++;
  if (why == outcome(Fault::STALLED) || (!greeted_ && why != outcome(Fault::CANCELLED) && why != outcome(Fault::LIMIT))) {
    net.stats.connect_failures++;
    net.failed(node);
  }
  on_closed(why);
  loop.remove(id);
}

void Conn::broke_protocol() {
  net.stats.protocol_errors++;
  close(outcome(Fault::BROKEN));
}

bool Conn::flush_locked() {
  while (out_at_ < out_.size()) {
    const ssize_t n = send(fd_, out_.data() + out_at_, out_.size() - out_at_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    out_at_ += size_t(n);
    net.stats.bytes_sent.fetch_add(uint64_t(n), std::memory_order_relaxed);
  }
  out_.clear();
  out_at_ = 0;
  return true;
}

void Conn::listen_locked() {
  if (fd_ < 0 || state() != State::OPEN) return;
  const uint32_t want = uint32_t(EPOLLIN) | (out_at_ < out_.size() || has_more() ? uint32_t(EPOLLOUT) : 0u);
  if (want == events_) return;
  events_ = want;
  epoll_event event{.events = want, .data = {.u64 = id}};
  epoll_ctl(loop.epoll(), EPOLL_CTL_MOD, fd_, &event);
}

ssize_t Conn::receive(void* into, size_t bytes, int flags) {
  ssize_t n;
  // Bare, because thread sanitizers take recv(null, MSG_TRUNC), which throws bytes away, for a write to address 0.
  do n = syscall(SYS_recvfrom, fd_, into, bytes, MSG_DONTWAIT | flags, nullptr, nullptr);
  while (n < 0 && errno == EINTR);
  if (n > 0) net.stats.bytes_received.fetch_add(uint64_t(n), std::memory_order_relaxed);
  return n;
}

bool Conn::read_hello() {
  constexpr size_t whole = sizeof hello_;
  while (hello_got_ < whole) {
    size_t want = whole - hello_got_;
    if (hello_got_ < sizeof(wire::FrameHeader)) want = sizeof(wire::FrameHeader) - hello_got_;   // a refusal is a bare header
    const ssize_t n = receive(hello_ + hello_got_, want);
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) return close(outcome(Fault::BROKEN)), false;
    hello_got_ += uint32_t(n);
    if (hello_got_ == sizeof(wire::FrameHeader)) {
      wire::FrameHeader h;
      std::memcpy(&h, hello_, sizeof h);
      if (h.magic != wire::MAGIC || h.verb != uint8_t(wire::Verb::HELLO) || h.kind != uint8_t(wire::Kind::REPLY)) return broke_protocol(), false;
      if (h.status != 0) return close(h.status), false;
      if (h.body_bytes != sizeof(wire::Hello)) return broke_protocol(), false;
    }
  }
  wire::Hello hello;
  wire::FrameHeader h;
  std::memcpy(&h, hello_, sizeof h);
  std::memcpy(&hello, hello_ + sizeof h, sizeof hello);
  if (h.body_check != wire::body_check(&hello, sizeof hello)) return broke_protocol(), false;
  if (hello.version_min > wire::VERSION || hello.version_max < wire::VERSION) return close(outcome(Status::BAD_VERSION)), false;
  if (std::memcmp(hello.cluster, net.config.cluster.data(), net.config.cluster.size())) return close(outcome(Status::WRONG_CLUSTER)), false;
  greeted_ = true;
  net.heard_epoch(hello.epoch);
  net.succeeded(node);
  heard(now_ns());
  return true;
}

void Conn::on_events(uint32_t events) {
  if (state() == State::CONNECTING) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) return close(outcome(Fault::UNREACHABLE));
    if (!(events & EPOLLOUT)) return;
    bool fine;
    {
      std::lock_guard lock(mutex_);
      state_.store(State::OPEN, std::memory_order_release);
      fine = flush_locked();
    }
    if (!fine) return close(outcome(Fault::BROKEN));
    on_open();
    if (state() == State::CLOSED) return;
    std::lock_guard lock(mutex_);
    listen_locked();
    return;
  }
  if (state() != State::OPEN) return;
  if (events & EPOLLOUT) {
    bool fine, flushed;
    {
      std::lock_guard lock(mutex_);
      fine = flush_locked();
      flushed = out_.empty();
    }
    if (!fine) return close(outcome(Fault::BROKEN));
    if (flushed && has_more()) send_more();
    if (state() == State::CLOSED) return;
    std::lock_guard lock(mutex_);
    listen_locked();
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    if (!(events & EPOLLIN) && (events & (EPOLLHUP | EPOLLERR))) return close(outcome(Fault::BROKEN));
    if (!greeted_ && !read_hello()) return;
    if (state() == State::OPEN) on_read();
  }
}

bool Conn::on_sweep(int64_t now) {
  if ((state() == State::CONNECTING || !greeted_) && now - opened_ns_ > net.config.connect_timeout_ns) {
    close(outcome(Fault::STALLED));
    return false;
  }
  return state() == State::CONNECTING;
}

}  // namespace kv::client
