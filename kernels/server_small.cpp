// Accepting, HELLO, DISCOVER, PROMISE, WITHDRAW, WHY, ADMIT.
#include "server_small.hpp"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server_bulk.hpp"

namespace kv {
namespace {
constexpr size_t RECV_BYTES = 256 << 10;
constexpr size_t OUT_BYTES_MAX = 1 << 20;      // unsent replies, past which a connection is not read from
constexpr uint32_t DISCOVER_KEYS = 256;        // per Store::discover: at most 2.4 MB of writings in memory at once
constexpr uint32_t REFUSED_LINGERING_MAX = 64;

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

SmallLoop::SmallLoop(ServerShared& shared, int listener, std::vector<BulkLoop*> bulk)
    : Loop(shared), listener_(listener), bulk_(std::move(bulk)), scratch_(RECV_BYTES) {
  listen(true);
}
SmallLoop::~SmallLoop() {
  stop();
  if (listener_ >= 0) ::close(listener_);
}

void SmallLoop::listen(bool on) {
  if (listening_ == on || listener_ < 0) return;
  listening_ = on;
  hurried_ = !on && !shared_.draining.load();
  watch(listener_, LISTEN_TOKEN, on);
}

void SmallLoop::on_message(Message&) {
  if (!shared_.draining.load() || listener_ < 0) return;
  listen(false);
  ::close(listener_);
  listener_ = -1;
}

void SmallLoop::on_event(uint64_t token) {
  if (token == LISTEN_TOKEN) accept_some();
}

void SmallLoop::on_tick(int64_t) {
  listen(true);   // after running out of descriptors
  shared_.arena.trim();
}

void SmallLoop::accept_some() {
  for (int i = 0; i < 64 && listener_ >= 0; i++) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) listen(false);   // try again at the next tick
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    auto& stats = shared_.stats;
    const uint64_t open = stats.connections.load(std::memory_order_relaxed);
    const uint64_t limit = shared_.config.connections_max;
    if (open >= limit + REFUSED_LINGERING_MAX) {
      add(stats.connections_refused);
      ::close(fd);
      continue;
    }
    set_options(fd, shared_.config.progress_ms);
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

Loop::Turn SmallLoop::serve(Conn& conn) {
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
      add(shared_.stats.bytes_in, uint64_t(n));
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
      BulkLoop* to = bulk_[next_bulk_++ % bulk_.size()];
      Message message;
      message.kind = Message::Kind::ADOPT;
      message.adopted = release(conn);
      to->post(std::move(message));
      return Turn::MOVED;
    }
  }
  return Turn::AGAIN;
}

// One frame from [at, end); moves `at` behind it.
SmallLoop::Parsed SmallLoop::parse(Conn& conn, const uint8_t*& at, const uint8_t* end) {
  wire::FrameHeader header;
  if (size_t(end - at) < sizeof header) return Parsed::MORE;
  std::memcpy(&header, at, sizeof header);
  Status why = Status::OK;
  switch (check_header(header, conn, why)) {
    case HeaderCheck::NOT_OURS: add(shared_.stats.frames_malformed); return Parsed::GONE;
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
    status = answer(conn, header, body);
  } catch (const std::exception&) {
    add(shared_.stats.faults);
    conn.out.resize(before);
  }
  if (status == Status::BAD_REQUEST || status == Status::TOO_LARGE) return refuse(conn, header, status);
  if (status != Status::OK) append_bare(conn.out, header, status);
  shared_.stats.answered(op_of(header.verb), status, conn.used_ns);
  return Parsed::ANSWERED;
}

SmallLoop::Parsed SmallLoop::refuse(Conn& conn, const wire::FrameHeader& header, Status why) {
  add(shared_.stats.frames_malformed);
  add(shared_.stats.requests[uint32_t(op_of(header.verb))][uint32_t(why)]);
  append_bare(conn.out, header, why);
  return Parsed::REFUSED;
}

SmallLoop::Parsed SmallLoop::greet(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::Hello hello;
  if (header.body_bytes < sizeof hello) return refuse(conn, header, Status::BAD_REQUEST);
  std::memcpy(&hello, body, sizeof hello);
  if (header.body_bytes != sizeof hello + uint64_t(hello.capability_bytes) || hello.role > 1) return refuse(conn, header, Status::BAD_REQUEST);
  Status status = Status::OK;
  if (hello.version_min > wire::VERSION || hello.version_max < wire::VERSION) status = Status::BAD_VERSION;
  else if (std::memcmp(hello.cluster, shared_.config.cluster.data(), sizeof hello.cluster)) status = Status::WRONG_CLUSTER;
  else if (shared_.draining.load()) status = Status::DRAINING;
  shared_.stats.answered(Op::HELLO, status, conn.used_ns);
  if (status != Status::OK) {
    append_bare(conn.out, header, status);
    return Parsed::REFUSED;
  }
  shared_.stats.saw_epoch(hello.epoch);
  wire::Hello mine{};
  mine.version_min = mine.version_max = wire::VERSION;
  mine.role = hello.role;
  std::memcpy(mine.cluster, hello.cluster, sizeof mine.cluster);
  mine.epoch = shared_.epoch.load();
  mine.boot_id = shared_.boot_id;
  mine.bucket_seconds = shared_.config.bucket_seconds;
  mine.bucket = shared_.store.bucket_now();
  append_header(conn.out, header, wire::Kind::REPLY, Status::OK, sizeof mine, wire::body_check(&mine, sizeof mine), 0);
  const auto* p = reinterpret_cast<const uint8_t*>(&mine);
  conn.out.insert(conn.out.end(), p, p + sizeof mine);
  conn.phase = Phase::OPEN;
  if (hello.role == uint8_t(wire::Role::SMALL)) return Parsed::ANSWERED;
  conn.bulk = std::make_unique<BulkState>();
  return Parsed::MOVED;
}

// OK: the reply is in conn.out. Anything else: a bare reply is due.
Status SmallLoop::answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  if (shared_.draining.load()) return Status::DRAINING;
  switch (wire::Verb(header.verb)) {
    case wire::Verb::DISCOVER: return discover(conn, header, body);
    case wire::Verb::PROMISE: return promise(conn, header, body);
    case wire::Verb::WHY: return why(conn, header, body);
    case wire::Verb::ADMIT: return admit(conn, header, body);
    default: return withdraw(conn, header, body);
  }
}

namespace {
// Puts header and body behind what conn.out holds.
void append_reply(Conn& conn, const wire::FrameHeader& request, const std::vector<uint8_t>& body) {
  append_header(conn.out, request, wire::Kind::REPLY, Status::OK, uint32_t(body.size()), wire::body_check(body.data(), body.size()), 0);
  conn.out.insert(conn.out.end(), body.begin(), body.end());
}

// Takes the fixed part of a request whose body is that and `count` items, exactly. Its other fields are the verb's to check.
template <class Request>
Status take_request(const wire::FrameHeader& header, const uint8_t* body, uint32_t count_max, size_t item_bytes, Request& request) {
  if (header.body_bytes < sizeof request) return Status::BAD_REQUEST;
  std::memcpy(&request, body, sizeof request);
  if (request.count > count_max) return Status::TOO_LARGE;
  return header.body_bytes == sizeof request + uint64_t(request.count) * item_bytes ? Status::OK : Status::BAD_REQUEST;
}

template <class Request>
Owner owner_of(const Request& request) {
  Owner owner;
  std::memcpy(owner.data(), request.owner, owner.size());
  return owner;
}
}  // namespace

Status SmallLoop::discover(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::DiscoverRequest request;
  if (const Status why = take_request(header, body, wire::KEYS_MAX, KEY_BYTES, request); why != Status::OK) return why;
  if (request.flags) return Status::BAD_REQUEST;
  shared_.stats.saw_epoch(request.epoch);
  const Owner owner = owner_of(request);
  wire::DiscoverReply total{};
  result_.assign(sizeof total, 0);
  for (uint32_t first = 0; first < request.count && !total.busy; first += DISCOVER_KEYS) {
    const uint32_t count = std::min(DISCOVER_KEYS, request.count - first);
    found_.clear();
    shared_.store.discover(owner, body + sizeof request + size_t(first) * KEY_BYTES, count, found_);
    wire::DiscoverReply part;
    std::memcpy(&part, found_.data(), sizeof part);
    total.busy |= part.busy;
    size_t at = sizeof part;
    for (uint32_t i = 0; i < part.writings; i++) {
      wire::Writing w;
      std::memcpy(&w, found_.data() + at, sizeof w);
      const size_t bytes = align_up(sizeof w + 4ull * w.earlier_count, 8) + 8ull * w.block_count;
      if (result_.size() + bytes > wire::SMALL_BODY_MAX) {   // a reply has a limit too: the rest was "not looked at"
        total.busy = 1;
        break;
      }
      w.key_ordinal += first;
      std::memcpy(found_.data() + at, &w, sizeof w);
      result_.insert(result_.end(), found_.begin() + ptrdiff_t(at), found_.begin() + ptrdiff_t(at + bytes));
      total.writings++;
      at += bytes;
    }
  }
  std::memcpy(result_.data(), &total, sizeof total);
  append_reply(conn, header, result_);
  return Status::OK;
}

Status SmallLoop::promise(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::PromiseRequest request;
  if (const Status why = take_request(header, body, wire::KEYS_MAX, sizeof(wire::WritingName), request); why != Status::OK) return why;
  if (request.flags & ~(wire::PROMISE_PIN | wire::PROMISE_TOUCH) || request.retention_class >= CLASSES_MAX || request.zero) return Status::BAD_REQUEST;
  shared_.stats.saw_epoch(request.epoch);
  names_.resize(request.count);   // a copy, for its alignment
  std::memcpy(names_.data(), body + sizeof request, names_.size() * sizeof(wire::WritingName));
  result_.assign(names_.size() * sizeof(wire::PromiseAnswer), 0);
  shared_.store.promise(request, names_.data(), reinterpret_cast<wire::PromiseAnswer*>(result_.data()));
  append_reply(conn, header, result_);
  return Status::OK;
}

Status SmallLoop::why(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::WhyRequest request;
  if (const Status why = take_request(header, body, wire::WHY_KEYS_MAX, KEY_BYTES, request); why != Status::OK) return why;
  if (request.zero) return Status::BAD_REQUEST;
  const Owner owner = owner_of(request);
  shared_.store.why(owner, body + sizeof request, request.count, result_);
  append_reply(conn, header, result_);
  return Status::OK;
}

Status SmallLoop::admit(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::AdmitRequest request;
  if (const Status why = take_request(header, body, wire::KEYS_MAX, KEY_BYTES, request); why != Status::OK) return why;
  const Owner owner = owner_of(request);
  result_.assign(request.count * sizeof(uint32_t), 0);
  shared_.store.admit(owner, body + sizeof request, request.count, request.bucket, reinterpret_cast<uint32_t*>(result_.data()));
  append_reply(conn, header, result_);
  return Status::OK;
}

Status SmallLoop::withdraw(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::WithdrawRequest request;
  if (const Status why = take_request(header, body, wire::KEYS_MAX, sizeof(wire::WritingName), request); why != Status::OK) return why;
  if (request.zero) return Status::BAD_REQUEST;
  const Owner owner = owner_of(request);
  names_.resize(request.count);
  std::memcpy(names_.data(), body + sizeof request, names_.size() * sizeof(wire::WritingName));
  result_.assign(names_.size() * sizeof(uint32_t), 0);
  shared_.store.withdraw(owner, names_.data(), request.count, reinterpret_cast<uint32_t*>(result_.data()));
  append_reply(conn, header, result_);
  return Status::OK;
}

}  // namespace kv
