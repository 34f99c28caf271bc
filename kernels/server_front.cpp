// Listening, accepting, HELLO, and cutting the input of a connection into frames.
#include "server_front.hpp"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <system_error>

#include "tcp.hpp"

namespace kv {
namespace {
constexpr size_t RECV_BYTES = 256 << 10;
constexpr size_t OUT_BYTES_MAX = 1 << 20;      // unsent replies, past which a connection is not read from
constexpr uint32_t REFUSED_LINGERING_MAX = 64;

[[noreturn]] void fail(int error, const std::string& what) { throw std::system_error(error, std::generic_category(), what); }

void set_options(int fd, uint32_t progress_ms) {
  const int on = 1, seconds = 1, probes = 2;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A dead host is found within 3 s when idle (keepalive), within progress_ms when it owes acknowledgements.
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &progress_ms, sizeof progress_ms);
}
}  // namespace

int listen_on(const std::string& host, uint16_t& port, const std::string& congestion_control) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) fail(EINVAL, "\"" + host + "\" is not an IP address");
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  int error = fd < 0 ? errno : 0;
  if (!error && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0) error = errno;
  if (!error) set_congestion_control(fd, congestion_control);   // connections inherit it
  if (!error && bind(fd, found->ai_addr, found->ai_addrlen) < 0) error = errno;
  freeaddrinfo(found);
  if (!error && ::listen(fd, 1024) < 0) error = errno;
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (!error && getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) < 0) error = errno;
  char service[16];
  if (!error && getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, nullptr, 0, service, sizeof service, NI_NUMERICSERV)) error = EINVAL;
  if (error) {
    if (fd >= 0) ::close(fd);
    fail(error, host + ":" + std::to_string(port));
  }
  port = uint16_t(std::stoul(service));
  return fd;
}

uint64_t random_boot_id() {
  uint64_t id = 0;
  while (!id)
    if (getrandom(&id, sizeof id, 0) < 0) fail(errno, "getrandom");
  return id;
}

void append_reply(Conn& conn, const wire::FrameHeader& request, const std::vector<uint8_t>& body) {
  append_header(conn.out, request, wire::Kind::REPLY, Status::OK, uint32_t(body.size()), wire::body_check(body.data(), body.size()), 0);
  conn.out.insert(conn.out.end(), body.begin(), body.end());
}

FrontLoop::FrontLoop(FrontShared& shared, int listener) : Loop(shared), listener_(listener), scratch_(RECV_BYTES) { listen(true); }
FrontLoop::~FrontLoop() {
  if (listener_ >= 0) ::close(listener_);
}

void FrontLoop::listen(bool on) {
  if (listening_ == on || listener_ < 0) return;
  listening_ = on;
  hurried_ = !on && !common_.draining.load();
  watch(listener_, LISTEN_TOKEN, on);
}

void FrontLoop::on_message(Message&) {
  if (!common_.draining.load() || listener_ < 0) return;
  listen(false);
  ::close(listener_);
  listener_ = -1;
}

void FrontLoop::on_event(uint64_t token) {
  if (token == LISTEN_TOKEN) accept_some();
}

void FrontLoop::on_tick(int64_t) { listen(true); }   // after running out of descriptors

void FrontLoop::accept_some() {
  for (int i = 0; i < 64 && listener_ >= 0; i++) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) listen(false);   // try again at the next tick
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    auto& stats = common_.stats;
    const uint64_t open = stats.connections.load(std::memory_order_relaxed);
    const uint64_t limit = common_.front.connections_max;
    if (open >= limit + REFUSED_LINGERING_MAX) {
      add(stats.connections_refused);
      ::close(fd);
      continue;
    }
    set_options(fd, common_.front.progress_ms);
    add(stats.connections);
    add(stats.connections_opened);
    auto conn = std::make_unique<Conn>(next_id_++, fd);
    if (open >= limit) {
      add(stats.connections_refused);
      wire::FrameHeader hello{};
      hello.verb = uint8_t(wire::Verb::HELLO);
      append_bare(conn->out, hello, Status::BUSY, 1000);
      conn->phase = Phase::CLOSING;
    }
    adopt(std::move(conn));
  }
}

Loop::Turn FrontLoop::serve(Conn& conn) {
  for (int round = 0; round < 4; round++) {
    if (conn.pending() && conn.writable && !flush(conn, false)) return Turn::CLOSE;
    if (conn.phase >= Phase::CLOSING) return finish(conn);
    if (conn.pending() > OUT_BYTES_MAX) return Turn::REST;
    const uint8_t* at = conn.in.data();
    const uint8_t* end = at + conn.in.size();
    bool held = true;   // [at, end) is in conn.in
    if (!conn.stalled) {
      if (!conn.readable) return Turn::REST;
      const ssize_t n = recv(conn.fd, scratch_.data(), scratch_.size(), MSG_DONTWAIT);
      if (n < 0) {
        if (dead(errno)) return Turn::CLOSE;
        if (errno == EINTR) continue;
        conn.readable = false;
        return Turn::REST;
      }
      if (n == 0) return Turn::CLOSE;
      if (size_t(n) < scratch_.size() && !conn.hangup) conn.readable = false;   // what comes later is a new edge
      conn.moved(uint64_t(n));
      add(common_.stats.bytes_in, uint64_t(n));
      held = !conn.in.empty();
      if (held) conn.in.insert(conn.in.end(), scratch_.data(), scratch_.data() + n);   // the rest of a frame begun earlier
      const auto& from = held ? conn.in : scratch_;
      at = from.data();
      end = at + (held ? conn.in.size() : size_t(n));
    }
    Parsed parsed;
    do parsed = parse(conn, at, end);
    while (parsed == Parsed::ANSWERED && conn.pending() <= OUT_BYTES_MAX);
    conn.stalled = parsed == Parsed::ANSWERED;
    if (parsed == Parsed::GONE) return Turn::CLOSE;
    if (parsed == Parsed::REFUSED) {
      conn.phase = Phase::CLOSING;
      conn.in.clear();
      continue;
    }
    if (held) conn.in.erase(conn.in.begin(), conn.in.begin() + (at - conn.in.data()));
    else if (at != end) conn.in.assign(at, end);
    if (conn.in.empty() && conn.in.capacity() > (64 << 10)) conn.in.shrink_to_fit();
    if (parsed == Parsed::MOVED) {
      give_away(conn);
      return Turn::MOVED;
    }
  }
  return Turn::AGAIN;
}

// One frame from [at, end); moves `at` behind it.
FrontLoop::Parsed FrontLoop::parse(Conn& conn, const uint8_t*& at, const uint8_t* end) {
  wire::FrameHeader header;
  if (size_t(end - at) < sizeof header) return Parsed::MORE;
  std::memcpy(&header, at, sizeof header);
  Status why = Status::OK;
  switch (check_header(header, conn, why)) {
    case HeaderCheck::NOT_OURS: add(common_.stats.frames_malformed); return Parsed::GONE;
    case HeaderCheck::REFUSED: return refuse(conn, header, why);
    case HeaderCheck::OK: break;
  }
  if (size_t(end - at) < sizeof header + header.body_bytes) return Parsed::MORE;
  const uint8_t* body = at + sizeof header;
  at = body + header.body_bytes;
  conn.used_ns = now_ns();
  if (wire::body_check(body, header.body_bytes) != header.body_check) return refuse(conn, header, Status::CORRUPT);
  if (conn.phase == Phase::GREETING) return greet(conn, header, body);
  const size_t before = conn.out.size();
  Status status = Status::INTERNAL;
  try {
    status = common_.draining.load() ? Status::DRAINING : answer(conn, header, body);
  } catch (const std::exception&) {
    add(common_.stats.faults);
    conn.out.resize(before);
  }
  if (status == Status::BAD_REQUEST || status == Status::TOO_LARGE) return refuse(conn, header, status);
  if (status != Status::OK) append_bare(conn.out, header, status);
  common_.stats.answered(op_of(header.verb), status, conn.used_ns);
  return Parsed::ANSWERED;
}

FrontLoop::Parsed FrontLoop::refuse(Conn& conn, const wire::FrameHeader& header, Status why) {
  add(common_.stats.frames_malformed);
  add(common_.stats.requests[uint32_t(op_of(header.verb))][uint32_t(why)]);
  append_bare(conn.out, header, why);
  return Parsed::REFUSED;
}

FrontLoop::Parsed FrontLoop::greet(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::Hello hello;
  if (header.body_bytes < sizeof hello) return refuse(conn, header, Status::BAD_REQUEST);
  std::memcpy(&hello, body, sizeof hello);
  if (header.body_bytes != sizeof hello + uint64_t(hello.capability_bytes) || !serves(wire::Role(hello.role))) return refuse(conn, header, Status::BAD_REQUEST);
  Status status = Status::OK;
  if (hello.version_min > wire::VERSION || hello.version_max < wire::VERSION) status = Status::BAD_VERSION;
  else if (std::memcmp(hello.cluster, common_.front.cluster.data(), sizeof hello.cluster)) status = Status::WRONG_CLUSTER;
  else if (common_.draining.load()) status = Status::DRAINING;
  common_.stats.answered(Op::HELLO, status, conn.used_ns);
  if (status != Status::OK) {
    append_bare(conn.out, header, status);
    return Parsed::REFUSED;
  }
  common_.stats.saw_epoch(hello.epoch);
  wire::Hello mine{};
  mine.version_min = mine.version_max = wire::VERSION;
  mine.role = hello.role;
  std::memcpy(mine.cluster, hello.cluster, sizeof mine.cluster);
  mine.epoch = common_.epoch.load();
  mine.boot_id = common_.boot_id;
  on_greeting(mine);
  append_header(conn.out, header, wire::Kind::REPLY, Status::OK, sizeof mine, wire::body_check(&mine, sizeof mine), 0);
  const auto* p = reinterpret_cast<const uint8_t*>(&mine);
  conn.out.insert(conn.out.end(), p, p + sizeof mine);
  conn.phase = Phase::OPEN;
  conn.role = wire::Role(hello.role);
  return conn.role == wire::Role::BULK ? Parsed::MOVED : Parsed::ANSWERED;
}

}  // namespace kv
