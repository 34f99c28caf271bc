// ReadConn: one bulk connection, bringing the items of one stream at a time. See client_load.hpp.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "client_load.hpp"
#include "past_cache.hpp"

namespace kv::client {

using wire::FrameHeader;

ReadConn::ReadConn(Net& n, Node& to, bool rdma) : Conn(n, to, n.bulk_loop(to.index), wire::Role::BULK), rdma_(rdma) {
  net.stats.bulk_connections++;
  if (rdma) link_ = std::make_unique<VerbsLink>();
}

ReadConn::~ReadConn() { net.stats.bulk_connections--; }

std::shared_ptr<ReadConn> ReadConn::lease(Net& net, Node& node, bool fresh, uint64_t body_bytes) {
  const bool rdma = net.rdma_to(node) && fits_zone(net, body_bytes);
  if (!rdma && net.config.transport == Transport::RDMA) return nullptr;
  std::lock_guard lock(node.mutex);
  std::erase_if(node.idle, [](const auto& conn) { return conn->state() == State::CLOSED; });
  for (size_t i = fresh ? 0 : node.idle.size(); i-- > 0;) {   // the last used one first
    auto conn = node.idle[i];
    if (conn->rdma_.load(std::memory_order_relaxed) != rdma) continue;
    node.idle.erase(node.idle.begin() + ptrdiff_t(i));
    return conn;
  }
  if (node.down(now_ns()) || net.stats.bulk_connections.load() >= int64_t(net.config.bulk_connections_max)) return nullptr;
  return std::make_shared<ReadConn>(net, node, rdma);
}

void ReadConn::start(std::shared_ptr<Stream> stream) {
  stream_ = std::move(stream);
  stream_->requests.clear();
  item_ = request_ = asked_ = 0;
  last_ = uint32_t(stream_->items.size());
  header_got_ = 0;
  body_bytes_ = body_got_ = 0;
  discarding_ = heard_any_ = draining_ = false;
  lease_ = net.next_id();
  stream_->last_ns.store(now_ns(), std::memory_order_relaxed);
  if (state() == State::CLOSED) return on_closed(outcome(Fault::BROKEN));
  last_heard_ns_ = now_ns();
  if (link_) {
    if (state() == State::NEW) {
      make_landing();
      open();
    }
  }
  if (!ask()) return;
  if (!link_ && state() == State::NEW) open();
  drain();
}

bool ReadConn::ask() {
  if (!link_) return ask_by_tcp();
  if (link_->state == VerbsLink::State::READY) ask_by_rdma();
  return state() != State::CLOSED;
}

bool ReadConn::ask_by_tcp() {
  const uint32_t first = asked_;
  asked_ = std::min(last_, stream_->job->may_ask(*stream_, first));
  return asked_ == first || send_bytes(stream_->job->read_frames(*stream_, first, asked_));
}

void ReadConn::go_on(const std::shared_ptr<Stream>& stream) {
  if (stream_ != stream || draining_ || state() == State::CLOSED) return;
  if (item_ == asked_) {   // it owed nothing: its time begins anew
    last_heard_ns_ = now_ns();
    stream_->last_ns.store(last_heard_ns_, std::memory_order_relaxed);
  }
  ask();
}

bool ReadConn::send_bytes(const std::vector<uint8_t>& bytes) {
  bool fine = true;
  {
    std::lock_guard lock(mutex_);
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    if (state() == State::OPEN) {
      fine = flush_locked();
      listen_locked();
    }
  }
  if (!fine) close(outcome(Fault::BROKEN));
  return fine;
}

void ReadConn::drain() {
  if (!stream_ || !stream_->drain.load() || draining_ || state() == State::CLOSED) return;
  draining_ = true;
  drain_since_ns_ = now_ns();
  last_ = asked_;   // what was not asked will not come
  if (item_ == last_) return finish();
  uint64_t rest = 0;
  for (size_t i = item_; i < last_; i++) rest += stream_->job->body_bytes(stream_->items[i]);
  if (rest > net.config.drain_bytes_max) close(outcome(node.late() ? Fault::STALLED : Fault::CANCELLED));
}

uint8_t* ReadConn::buffer() {
  thread_local const std::unique_ptr<uint8_t, decltype(&std::free)> held{static_cast<uint8_t*>(std::aligned_alloc(4096, STEP_BYTES)), &std::free};
  if (!held) throw std::bad_alloc();
  return held.get();
}

void ReadConn::on_read() {
  if (link_) return read_tcp();
  for (int turn = 0; turn < 4; turn++) {
    const size_t want = discarding_ ? size_t(std::min<uint64_t>(body_bytes_ - body_got_, 4 * STEP_BYTES)) : STEP_BYTES;
    const ssize_t n = discarding_ ? receive(nullptr, want, MSG_TRUNC) : receive(buffer(), want);   // TCP throws bytes away without copying them
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return close(outcome(n == 0 && !stream_ ? Fault::CANCELLED : Fault::BROKEN));
    net.stats.read_bytes_tcp.fetch_add(uint64_t(n), std::memory_order_relaxed);
    if (stream_) heard_stream();
    if (!discarding_) {
      if (!take(buffer(), size_t(n))) return;
    } else if ((body_got_ += uint64_t(n)) == body_bytes_) {
      next_item();
    }
    if (size_t(n) < want) return;
  }
}

bool ReadConn::take(const uint8_t* at, size_t bytes) {
  while (bytes) {
    if (!stream_ || item_ == asked_) return broke_protocol(), false;   // it owes nothing: a healthy peer is silent
    size_t n;
    if (header_got_ < sizeof(FrameHeader)) {
      n = std::min(bytes, sizeof(FrameHeader) - header_got_);
      std::memcpy(header_ + header_got_, at, n);
      header_got_ += uint32_t(n);
      if (header_got_ == sizeof(FrameHeader) && !parse_header()) return false;
    } else {
      n = size_t(std::min<uint64_t>(bytes, body_bytes_ - body_got_));
      take_body(at, n);
      if (body_got_ == body_bytes_) next_item();
    }
    at += n;
    bytes -= n;
  }
  return true;
}

void ReadConn::take_body(const uint8_t* at, size_t bytes) {
  LoadJob& job = *stream_->job;
  const Stream::Item& item = stream_->items[item_];
  Target to;
  if (discarding_ || !job.claim(item, lease_, body_got_ == 0, to)) {
    discarding_ = true;
    body_got_ += bytes;
    return;
  }
  const bool good = fill(job, item, to, at, bytes);
  past_cache_done();
  body_got_ += bytes;
  discarding_ = !good;
  job.release(item, !good ? LoadJob::Got::BAD : body_got_ == body_bytes_ ? LoadJob::Got::WHOLE : LoadJob::Got::PART);
}

// A piece that is here whole is checked before it goes to its place; one that comes in parts when its last one has gone there.
bool ReadConn::fill(const LoadJob& job, const Stream::Item& item, const Target& to, const uint8_t* at, size_t bytes) {
  const uint64_t checks_bytes = 24ull * job.blocks(item);
  const uint32_t piece = job.piece_bytes(item);
  uint64_t from = body_got_;
  if (from < checks_bytes) {
    const size_t n = size_t(std::min<uint64_t>(bytes, checks_bytes - from));
    std::memcpy(to.checks + from, at, n);
    at += n;
    bytes -= n;
    from += n;
  }
  while (bytes) {
    const uint32_t block = uint32_t((from - checks_bytes) / piece), skip = uint32_t((from - checks_bytes) % piece);
    const uint32_t n = uint32_t(std::min<uint64_t>(bytes, piece - skip));
    if (skip == 0 && n < piece) sum_.begin(job.seed(item.extent, item.plane, item.shard, block));
    if (n < piece) sum_.add(at, n);
    if (skip + n == piece) {
      uint64_t expected;
      std::memcpy(&expected, to.checks + 8ull * block, 8);
      if (expected != (n < piece ? sum_.value() : shard_sum(at, piece, job.seed(item.extent, item.plane, item.shard, block)))) return false;
    }
    if (skip < to.real) copy_past_cache(to.base + block * to.stride + skip, at, std::min<size_t>(n, to.real - skip));
    at += n;
    bytes -= n;
    from += n;
  }
  return true;
}

void ReadConn::heard_stream() {
  const int64_t now = now_ns();
  heard(now);
  heard_any_ = true;
  stream_->last_ns.store(now, std::memory_order_relaxed);
}

// The header of the item that is due, and its whole body follows.
bool ReadConn::announces_item(const FrameHeader& h) {
  const auto& requests = stream_->requests;
  while (request_ + 1 < requests.size() && item_ >= requests[request_ + 1].first_item) request_++;
  return h.magic == wire::MAGIC && h.version == wire::VERSION && h.verb == uint8_t(wire::Verb::READ) && h.request_id == requests[request_].id &&
         h.kind == uint8_t(wire::Kind::ITEM) && h.aux == item_ - requests[request_].first_item && h.status == 0 &&
         h.body_bytes == stream_->job->body_bytes(stream_->items[item_]);
}

void ReadConn::begin_body() {
  body_bytes_ = stream_->job->body_bytes(stream_->items[item_]);
  body_got_ = 0;
  discarding_ = false;
}

bool ReadConn::parse_header() {
  FrameHeader h;
  std::memcpy(&h, header_, sizeof h);
  if (announces_item(h)) return begin_body(), true;
  const auto& request = stream_->requests[request_];
  const bool ours = h.magic == wire::MAGIC && h.version == wire::VERSION && h.verb == uint8_t(wire::Verb::READ) && h.request_id == request.id;
  if (!ours || h.status == 0 || h.body_bytes != 0) return broke_protocol(), false;
  uint32_t end = item_ + 1;
  if (h.kind == uint8_t(wire::Kind::REPLY))   // the whole READ was refused
    end = size_t(request_) + 1 < stream_->requests.size() ? stream_->requests[request_ + 1].first_item : asked_;
  else if (h.kind != uint8_t(wire::Kind::ITEM) || h.aux != item_ - request.first_item)
    return broke_protocol(), false;
  stream_->job->lose(*stream_, item_, end, h.status);
  item_ = end - 1;
  next_item();
  return state() == State::OPEN;
}

void ReadConn::next_item() {
  item_++;
  header_got_ = 0;
  discarding_ = false;
  const auto stream = stream_;
  if (item_ == last_) finish();
  stream->job->settle(*stream, item_);
}

void ReadConn::finish() {
  node.heard();   // owes nothing: it may have been called late between its last byte and this
  stream_ = nullptr;
  idle_since_ns_ = now_ns();
  reused_ = true;
  draining_ = false;
  auto self = std::static_pointer_cast<ReadConn>(shared_from_this());
  std::lock_guard lock(node.mutex);
  node.idle.push_back(std::move(self));
}

void ReadConn::on_closed(Outcome why) {
  {
    std::lock_guard lock(node.mutex);
    std::erase_if(node.idle, [this](const auto& conn) { return conn.get() == this; });
  }
  auto stream = std::move(stream_);
  stream_ = nullptr;
  const bool unproven = link_ && !link_->proven && asked_;
  let_go();
  if (unproven && (why == outcome(Fault::BROKEN) || why == outcome(Fault::STALLED)))
    avoid_rdma("silent", "what was asked for did not come by RDMA (is UDP port 4791 open?)");
  if (!stream || stream->job->over()) return;
  // A kept connection that its peer had closed meanwhile says nothing about the node: once more, with a new one.
  // Nor does RDMA that brings nothing: then over TCP.
  const bool elsewhere = unproven && net.config.transport == Transport::AUTO;
  if (((reused_ && !heard_any_) || elsewhere) && why == outcome(Fault::BROKEN))
    stream->job->launch({stream}, true);
  else
    stream->job->lose(*stream, item_, uint32_t(stream->items.size()), why);
}

bool ReadConn::on_sweep(int64_t now) {
  if (Conn::on_sweep(now) || state() == State::CLOSED) return true;
  if (!stream_) {
    if (greeted_ && now - idle_since_ns_ > net.config.idle_timeout_ns) close(outcome(Fault::CANCELLED));
    return false;
  }
  const int64_t quiet = now - last_heard_ns_;
  if (draining_ && now - drain_since_ns_ > net.config.drain_timeout_ns)
    close(outcome(quiet > net.config.drain_timeout_ns ? Fault::STALLED : Fault::CANCELLED));
  else if (item_ < asked_ && quiet > net.config.stall_timeout_ns)
    close(outcome(Fault::STALLED));
  return true;
}

}  // namespace kv::client
