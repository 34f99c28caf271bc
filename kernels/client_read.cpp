// ReadConn: one bulk connection, bringing the items of one stream at a time. See client_load.hpp.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "client_load.hpp"

namespace kv::client {

using wire::FrameHeader;

ReadConn::ReadConn(Net& n, Node& to, bool parity)
    : Conn(n, to, n.bulk_loop(to.index, parity), wire::Role::BULK, parity ? n.config.parity_receive_bytes : 0), parity_(parity) {
  net.stats.bulk_connections++;
  if (parity_) node.parity_open++;
}

ReadConn::~ReadConn() {
  net.stats.bulk_connections--;
  if (parity_) node.parity_open--;
}

bool ReadConn::has_parity_room(Net& net, Node& node) {
  if (node.parity_open.load() < net.config.parity_connections_max) return true;
  std::lock_guard lock(node.mutex);
  return !node.idle_parity.empty();
}

std::shared_ptr<ReadConn> ReadConn::lease(Net& net, Node& node, bool parity, bool fresh) {
  std::lock_guard lock(node.mutex);
  auto& idle = parity ? node.idle_parity : node.idle_data;
  while (!fresh && !idle.empty()) {
    auto conn = std::move(idle.back());
    idle.pop_back();
    if (conn->state() == State::OPEN) return conn;
  }
  if (node.down(now_ns()) || net.stats.bulk_connections.load() >= int64_t(net.config.bulk_connections_max)) return nullptr;
  return std::make_shared<ReadConn>(net, node, parity);
}

void ReadConn::start(std::shared_ptr<Stream> stream) {
  stream_ = std::move(stream);
  item_ = request_ = 0;
  header_got_ = 0;
  body_bytes_ = body_got_ = 0;
  verified_ = 0;
  discarding_ = heard_any_ = draining_ = false;
  stream_->last_ns.store(now_ns(), std::memory_order_relaxed);
  if (state() == State::CLOSED) return on_closed(outcome(Fault::BROKEN));
  bool fine = true;
  {
    std::lock_guard lock(mutex_);
    out_.insert(out_.end(), stream_->frames.begin(), stream_->frames.end());
    reading_ = !stopped();
    if (state() == State::OPEN) {
      fine = flush_locked();
      listen_locked();
    }
  }
  last_heard_ns_ = now_ns();
  if (!fine) return close(outcome(Fault::BROKEN));
  if (state() == State::NEW) open();
  if (stream_ && stream_->drain.load()) go_on();
}

bool ReadConn::stopped() const {
  return stream_ && !stream_->drain.load(std::memory_order_relaxed) && item_ >= stream_->read_until.load(std::memory_order_relaxed);
}

void ReadConn::go_on() {
  if (!stream_ || state() == State::CLOSED) return;
  if (stream_->drain.load() && !draining_) {
    draining_ = true;
    drain_since_ns_ = now_ns();
    uint64_t rest = 0;
    for (size_t i = item_; i < stream_->items.size(); i++) rest += stream_->job->body_bytes(stream_->items[i]);
    if (rest > net.config.drain_bytes_max) return close(outcome(node.late() ? Fault::STALLED : Fault::CANCELLED));
  }
  std::lock_guard lock(mutex_);
  if (reading_ == !stopped()) return;
  reading_ = !stopped();
  last_heard_ns_ = now_ns();
  listen_locked();
}

void ReadConn::on_read() {
  for (int turn = 0; turn < 4; turn++) {
    if (stopped()) {
      std::lock_guard lock(mutex_);
      reading_ = false;
      listen_locked();
      return;
    }
    if (step() != Step::MORE) return;
  }
}

ReadConn::Step ReadConn::step() {
  if (!stream_) {   // idle: a healthy peer says nothing
    uint8_t byte;
    const ssize_t n = receive(&byte, 1);
    if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
    close(outcome(n == 0 ? Fault::CANCELLED : Fault::BROKEN));
    return Step::GONE;
  }
  if (header_got_ < sizeof(FrameHeader)) return header();
  return discarding_ ? discard() : scatter();
}

ReadConn::Step ReadConn::header() {
  const size_t want = sizeof(FrameHeader) - header_got_;
  const ssize_t n = receive(header_ + header_got_, want);
  if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
  if (n <= 0) return close(outcome(Fault::BROKEN)), Step::GONE;
  const int64_t now = now_ns();
  heard(now);
  heard_any_ = true;
  stream_->last_ns.store(now, std::memory_order_relaxed);
  header_got_ += uint32_t(n);
  if (header_got_ < sizeof(FrameHeader)) return Step::BLOCKED;
  return parse_header() ? Step::MORE : Step::GONE;
}

bool ReadConn::parse_header() {
  FrameHeader h;
  std::memcpy(&h, header_, sizeof h);
  const auto& requests = stream_->requests;
  while (request_ + 1 < requests.size() && item_ >= requests[request_ + 1].first_item) request_++;
  const auto& request = requests[request_];
  if (h.magic != wire::MAGIC || h.version != wire::VERSION || h.verb != uint8_t(wire::Verb::READ) || h.request_id != request.id)
    return broke_protocol(), false;
  const Stream::Item item = stream_->items[item_];
  if (h.kind == uint8_t(wire::Kind::REPLY)) {   // the whole READ was refused
    if (h.status == 0 || h.body_bytes != 0) return broke_protocol(), false;
    const uint32_t end = request_ + 1 < requests.size() ? requests[request_ + 1].first_item : uint32_t(stream_->items.size());
    stream_->job->lose(*stream_, item_, end, h.status);
    item_ = end - 1;
    next_item();
    return state() == State::OPEN;
  }
  if (h.kind != uint8_t(wire::Kind::ITEM) || h.aux != item_ - request.first_item) return broke_protocol(), false;
  if (h.status != 0) {
    if (h.body_bytes != 0) return broke_protocol(), false;
    stream_->job->lose(*stream_, item_, item_ + 1, h.status);
    next_item();
    return state() == State::OPEN;
  }
  if (h.body_bytes != stream_->job->body_bytes(item)) return broke_protocol(), false;
  body_bytes_ = h.body_bytes;
  body_got_ = 0;
  verified_ = 0;
  discarding_ = false;
  return true;
}

ReadConn::Step ReadConn::discard() {
  const uint64_t rest = body_bytes_ - body_got_;
  const size_t want = size_t(std::min<uint64_t>(rest, 4 * STEP_BYTES));
  const ssize_t n = receive(nullptr, want, MSG_TRUNC);   // TCP throws the bytes away without copying them
  if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
  if (n <= 0) return close(outcome(Fault::BROKEN)), Step::GONE;
  const int64_t now = now_ns();
  heard(now);
  stream_->last_ns.store(now, std::memory_order_relaxed);
  body_got_ += uint64_t(n);
  if (body_got_ == body_bytes_) next_item();
  return size_t(n) < want ? Step::BLOCKED : Step::MORE;
}

ReadConn::Step ReadConn::scatter() {
  auto job = stream_->job;
  const Stream::Item item = stream_->items[item_];
  LoadJob::Target to;
  if (!job->claim(item, tail_, to)) {
    discarding_ = true;
    return Step::MORE;
  }
  const uint32_t blocks = job->blocks(item), piece = job->piece_bytes(item);
  const uint64_t checks_bytes = 24ull * blocks;
  iovec iov[BLOCKS_PER_EXTENT_MAX + 2];
  int parts = 0;
  size_t want = 0;
  auto part = [&](uint8_t* at, size_t bytes) {
    iov[parts++] = {at, bytes};
    want += bytes;
  };
  uint64_t at = body_got_;
  if (at < checks_bytes) {
    part(to.checks + at, size_t(checks_bytes - at));
    at = checks_bytes;
  }
  while (at < body_bytes_ && want < STEP_BYTES) {
    const uint64_t in_pieces = at - checks_bytes;
    const uint32_t block = uint32_t(in_pieces / piece), skip = uint32_t(in_pieces % piece);
    uint64_t run = piece - skip;
    if (piece > STEP_BYTES / 2) run = std::min<uint64_t>(run, STEP_BYTES - want);
    if (to.stride == piece) run = std::min<uint64_t>(body_bytes_ - at, std::max<uint64_t>(run, STEP_BYTES - want));
    part(to.base + block * to.stride + skip, size_t(run));
    at += run;
  }
  const bool with_header = at == body_bytes_ && item_ + 1 < stream_->items.size();
  if (with_header) part(header_, sizeof(FrameHeader));
  msghdr message{};
  message.msg_iov = iov;
  message.msg_iovlen = size_t(parts);
  ssize_t n;
  do n = recvmsg(fd_, &message, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n <= 0) {
    const bool again = n < 0 && errno == EAGAIN;
    job->release(item, LoadJob::Got::PART);
    if (again) return Step::BLOCKED;
    close(outcome(Fault::BROKEN));
    return Step::GONE;
  }
  const int64_t now = now_ns();
  heard(now);
  stream_->last_ns.store(now, std::memory_order_relaxed);
  net.stats.bytes_received.fetch_add(uint64_t(n), std::memory_order_relaxed);
  const uint64_t body = std::min<uint64_t>(uint64_t(n), body_bytes_ - body_got_);
  body_got_ += body;
  const uint32_t whole = body_got_ > checks_bytes ? uint32_t((body_got_ - checks_bytes) / piece) : 0;
  const bool good = job->verify(item, to, verified_, whole);
  verified_ = whole;
  const bool ended = body_got_ == body_bytes_;
  if (good && ended && job->is_cut(item)) job->copy_tail(item, tail_.data());
  job->release(item, !good ? LoadJob::Got::BAD : ended ? LoadJob::Got::WHOLE : LoadJob::Got::PART);
  if (!good) discarding_ = true;
  if (ended) {
    next_item();
    header_got_ = uint32_t(uint64_t(n) - body);
    if (!stream_) return Step::BLOCKED;
    if (header_got_ == sizeof(FrameHeader) && !parse_header()) return Step::GONE;
  }
  return size_t(n) < want ? Step::BLOCKED : Step::MORE;
}

void ReadConn::next_item() {
  item_++;
  header_got_ = 0;
  discarding_ = false;
  if (item_ == stream_->items.size()) finish();
}

void ReadConn::finish() {
  stream_ = nullptr;
  idle_since_ns_ = now_ns();
  reused_ = true;
  draining_ = false;
  {
    std::lock_guard lock(mutex_);
    reading_ = true;   // so that the peer's end is seen
    listen_locked();
  }
  auto self = std::static_pointer_cast<ReadConn>(shared_from_this());
  std::lock_guard lock(node.mutex);
  (parity_ ? node.idle_parity : node.idle_data).push_back(std::move(self));
}

void ReadConn::on_closed(Outcome why) {
  {
    std::lock_guard lock(node.mutex);
    auto& idle = parity_ ? node.idle_parity : node.idle_data;
    std::erase_if(idle, [this](const auto& conn) { return conn.get() == this; });
  }
  auto stream = std::move(stream_);
  stream_ = nullptr;
  if (!stream || stream->job->over()) return;
  // A kept connection that its peer had closed meanwhile says nothing about the node: once more, with a new one.
  if (reused_ && !heard_any_ && why == outcome(Fault::BROKEN))
    stream->job->launch(stream, true);
  else
    stream->job->lose(*stream, item_, uint32_t(stream->items.size()), why);
}

bool ReadConn::on_sweep(int64_t now) {
  if (Conn::on_sweep(now) || state() == State::CLOSED) return true;
  if (!stream_) {
    if (greeted_ && now - idle_since_ns_ > net.config.idle_timeout_ns) close(outcome(Fault::CANCELLED));
    return false;
  }
  if (!reading_) return true;
  const int64_t quiet = now - last_heard_ns_;
  if (draining_ && now - drain_since_ns_ > net.config.drain_timeout_ns)
    close(outcome(quiet > net.config.drain_timeout_ns ? Fault::STALLED : Fault::CANCELLED));
  else if (quiet > net.config.stall_timeout_ns)
    close(outcome(Fault::STALLED));
  return true;
}

}  // namespace kv::client
