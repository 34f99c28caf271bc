// The epoll loop and what every connection shares: flags, flushing, closing politely, cutting who makes no progress.
#include "server_loop.hpp"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <system_error>

#include "priority.hpp"
#include "server_bulk.hpp"   // BulkState, whose end is a connection's

namespace kv {
namespace {
constexpr int64_t MS = 1'000'000;
constexpr int64_t LINGER_NS = 1000 * MS;
constexpr int TICK_MS = 250, QUIET_TICK_MS = 2000;
constexpr uint64_t PROGRESS_BYTES = 16 << 10;   // in a progress window: a peer slower than this only holds memory
}  // namespace

Conn::Conn(uint64_t number, int descriptor) : id(number), fd(descriptor) { window_ns = used_ns = now_ns(); }
Conn::~Conn() { ::close(fd); }

void append_header(std::vector<uint8_t>& out, const wire::FrameHeader& request, wire::Kind kind, Status status, uint32_t body_bytes,
                   uint32_t body_check, uint32_t aux) {
  wire::FrameHeader h{wire::MAGIC,     wire::VERSION, request.verb, uint8_t(kind), 0, request.request_id, uint32_t(status), body_bytes,
                      body_check, aux};
  const auto* p = reinterpret_cast<const uint8_t*>(&h);
  out.insert(out.end(), p, p + sizeof h);
}

namespace {
// The longest body of a verb; 0: not a verb of this role.
uint64_t hello_max(uint8_t verb) { return wire::Verb(verb) == wire::Verb::HELLO ? sizeof(wire::Hello) + 4096 : 0; }

uint64_t body_max_of(wire::Role role, uint8_t verb) {
  using wire::Role, wire::Verb;
  Role of = Role::SMALL;
  uint64_t most = wire::SMALL_BODY_MAX;
  switch (Verb(verb)) {
    case Verb::DISCOVER:
    case Verb::PROMISE:
    case Verb::WITHDRAW:
    case Verb::WHY:
    case Verb::ADMIT:
    case Verb::SUSPECT: break;
    case Verb::READ:
    case Verb::VERBS_READ: of = Role::BULK, most = wire::READ_BODY_MAX; break;
    case Verb::VERBS_OPEN: of = Role::BULK, most = sizeof(wire::VerbsOpen); break;
    case Verb::WRITE: of = Role::BULK, most = RECORD_BYTES_MAX; break;
    case Verb::REGISTER:
    case Verb::LOCATE:
    case Verb::TOUCH:
    case Verb::FORGET:
    case Verb::REPORT:
    case Verb::STATUS: of = Role::DIRECTORY; break;
    default: return 0;
  }
  return of == role ? most : 0;
}
}  // namespace

HeaderCheck check_header(const wire::FrameHeader& h, const Conn& conn, Status& why) {
  if (h.magic != wire::MAGIC) return HeaderCheck::NOT_OURS;
  why = Status::BAD_VERSION;
  if (h.version != wire::VERSION) return HeaderCheck::REFUSED;
  why = Status::BAD_REQUEST;
  if (h.kind != uint8_t(wire::Kind::REQUEST) || h.flags || h.status || h.aux) return HeaderCheck::REFUSED;
  const uint64_t body_max = conn.phase == Phase::GREETING ? hello_max(h.verb) : body_max_of(conn.role, h.verb);
  if (!body_max) return HeaderCheck::REFUSED;
  why = Status::TOO_LARGE;
  if (h.body_bytes > body_max) return HeaderCheck::REFUSED;
  return HeaderCheck::OK;
}

Loop::Loop(FrontShared& shared) : common_(shared) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) {
    const int e = errno;
    if (epoll_ >= 0) ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
    throw std::system_error(e, std::generic_category(), "epoll");
  }
  watch(wake_, WAKE_TOKEN, true);
}

Loop::~Loop() {
  stop();
  ::close(epoll_);
  ::close(wake_);
}

void Loop::start(const char* name, bool gives_way) {
  sigset_t all, old;   // signals are the main thread's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  thread_ = std::thread([this, gives_way] {
    if (gives_way) give_way_to_loads();
    run();
  });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_setname_np(thread_.native_handle(), name);
}

void Loop::stop() {
  stopping_.store(true);
  post({});
  if (thread_.joinable()) thread_.join();
  while (!conns_.empty()) close(*conns_.begin()->second);
  std::lock_guard lock(inbox_mutex_);
  sub(common_.stats.connections, [this] {
    uint64_t n = 0;
    for (auto& m : inbox_) n += m.adopted != nullptr;
    return n;
  }());
  inbox_.clear();
}

void Loop::post(Message message) {
  bool first;
  {
    std::lock_guard lock(inbox_mutex_);
    first = inbox_.empty();
    inbox_.push_back(std::move(message));
  }
  if (first) {
    const uint64_t one = 1;
    if (write(wake_, &one, sizeof one) < 0) return;   // full counter: it is awake already
  }
}

void Loop::watch(int fd, uint64_t token, bool on) {
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = token;
  epoll_ctl(epoll_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, &e);
}

void Loop::adopt(std::unique_ptr<Conn> conn) {
  epoll_event e{};
  e.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  e.data.u64 = conn->id;
  conn->ready = false;
  conn->readable = conn->writable = true;   // find out by trying
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, conn->fd, &e) < 0) {
    sub(common_.stats.connections);
    return;
  }
  Conn& c = *conn;
  conns_[c.id] = std::move(conn);
  make_ready(c);
}

std::unique_ptr<Conn> Loop::release(Conn& conn) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, conn.fd, nullptr);
  auto node = conns_.extract(conn.id);
  return std::move(node.mapped());
}

void Loop::make_ready(Conn& conn) {
  if (conn.ready) return;
  conn.ready = true;
  ready_.push_back(conn.id);
}

Conn* Loop::find(uint64_t id) {
  auto it = conns_.find(id);
  return it == conns_.end() ? nullptr : it->second.get();
}

void Loop::close(Conn& conn) {
  on_closed(conn);
  conns_.erase(conn.id);
  sub(common_.stats.connections);   // last: none counted, none held
}

bool Loop::dead(int error) {
  if (error == EAGAIN || error == EINTR) return false;
  if (error == ETIMEDOUT) add(common_.stats.connections_cut);   // the kernel saw it first: a vanished host, or a window long closed
  return true;
}

bool Loop::flush(Conn& conn, bool more) {
  while (conn.pending()) {
    const ssize_t n = send(conn.fd, conn.out.data() + conn.out_at, conn.pending(), MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (n < 0) {
      if (dead(errno)) return false;
      if (errno == EINTR) continue;
      conn.writable = false;
      return true;
    }
    conn.out_at += size_t(n);
    conn.moved(uint64_t(n));
    add(common_.stats.bytes_out, uint64_t(n));
  }
  conn.out.clear();
  conn.out_at = 0;
  if (conn.out.capacity() > (256 << 10)) conn.out.shrink_to_fit();
  return true;
}

bool Loop::swallow(Conn& conn) {
  while (conn.readable && !conn.eof) {
    const ssize_t n = recv(conn.fd, nullptr, 1 << 30, MSG_TRUNC | MSG_DONTWAIT);   // TCP: counted, not copied
    if (n == 0) conn.eof = true;
    if (n < 0) {
      if (dead(errno)) return true;
      if (errno == EINTR) continue;
      conn.readable = false;
    }
  }
  return conn.eof;
}

Loop::Turn Loop::finish(Conn& conn) {
  if (conn.phase == Phase::CLOSING) {
    if (conn.pending()) return Turn::REST;
    shutdown(conn.fd, SHUT_WR);
    conn.phase = Phase::LINGER;
    conn.window_ns = now_ns();
  }
  return swallow(conn) ? Turn::CLOSE : Turn::REST;
}

void Loop::run() {
  epoll_event events[128];
  int64_t swept = now_ns();
  int tick_ms = TICK_MS;
  while (!stopping_.load()) {
    // Nothing connected: nobody to time out, sleep until woken.
    const int timeout = !ready_.empty() ? 0 : hurried_ ? TICK_MS : conns_.empty() ? -1 : tick_ms;
    const int n = epoll_wait(epoll_, events, 128, timeout);
    const int64_t woken = now_ns();
    if (n > 0) tick_ms = TICK_MS;
    for (int i = 0; i < n; i++) {
      const uint64_t token = events[i].data.u64;
      if (token == WAKE_TOKEN) {
        uint64_t count;
        if (read(wake_, &count, sizeof count) < 0 && errno != EAGAIN) continue;
        std::vector<Message> taken;
        {
          std::lock_guard lock(inbox_mutex_);
          taken.swap(inbox_);
        }
        for (auto& m : taken) {
          if (m.kind == Message::Kind::ADOPT) adopt(std::move(m.adopted));
          else on_message(m);
        }
      } else if (token < FIRST_CONN) {
        on_event(token);
      } else if (Conn* conn = find(token)) {
        if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) conn->readable = true;
        if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) conn->hangup = true;
        if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) conn->writable = true;
        make_ready(*conn);
      }
    }
    for (size_t turns = ready_.size(); turns; turns--) {
      Conn* conn = find(ready_.front());
      ready_.pop_front();
      if (!conn) continue;
      conn->ready = false;
      Turn turn = Turn::CLOSE;
      try {
        turn = serve(*conn);
      } catch (const std::exception&) {   // no memory, or a fault below us: this connection's end, not the daemon's
        add(common_.stats.faults);
      }
      switch (turn) {
        case Turn::AGAIN: make_ready(*conn); break;
        case Turn::CLOSE: close(*conn); break;
        case Turn::REST:
        case Turn::MOVED: break;
      }
    }
    on_turn();
    const int64_t now = now_ns();
    if (now - swept >= TICK_MS * MS) {
      swept = now;
      tick_ms = sweep(now, now - woken >= TICK_MS * MS) ? TICK_MS : QUIET_TICK_MS;
      on_tick(now);
    }
  }
}

// True: someone is being waited for, look again soon. `away`: this thread was held up itself, by a slow disk say; then nobody is blamed.
bool Loop::sweep(int64_t now, bool away) {
  std::vector<Conn*> dead;
  bool waiting = false;
  for (auto& [id, conn] : conns_) {
    Conn& c = *conn;
    if (away) {
      c.window_ns = now;
      c.window_bytes = 0;
    }
    if (c.phase == Phase::LINGER) {
      waiting = true;
      if (now - c.window_ns > LINGER_NS) dead.push_back(&c);
    } else if (c.phase == Phase::GREETING || owes(c)) {
      waiting = true;
      if (now - c.window_ns <= common_.front.progress_ms * MS) continue;
      if (c.window_bytes < PROGRESS_BYTES) {
        add(common_.stats.connections_cut);
        dead.push_back(&c);
      }
      c.window_ns = now;
      c.window_bytes = 0;
    } else {
      c.window_ns = now;
      c.window_bytes = 0;
      if (idle(c) && now - c.used_ns > common_.front.idle_ms * MS) {
        add(common_.stats.connections_idle_closed);
        dead.push_back(&c);
      }
    }
  }
  for (Conn* c : dead) close(*c);
  return waiting;
}

}  // namespace kv
