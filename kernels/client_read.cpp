// ReadConn: one bulk connection, bringing the items of one stream at a time. See client_load.hpp.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "client_load.hpp"

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
  verified_ = 0;
  discarding_ = heard_any_ = draining_ = false;
  ahead_ = true;
  spill_.clear();
  spill_at_ = 0;
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

void ReadConn::on_read() {
  if (link_) return read_tcp();
  for (int turn = 0; turn < 4 || spilled(); turn++)
    if (step() != Step::MORE) return;
}

ReadConn::Step ReadConn::step() {
  if (!stream_ || item_ == asked_) {   // owes nothing: a healthy peer is silent
    uint8_t byte;
    if (spilled()) return broke_protocol(), Step::GONE;
    const ssize_t n = receive(&byte, 1);
    if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
    close(outcome(n == 0 && !stream_ ? Fault::CANCELLED : Fault::BROKEN));
    return Step::GONE;
  }
  if (header_got_ < sizeof(FrameHeader)) return header();
  return discarding_ ? discard() : scatter();
}

ReadConn::Step ReadConn::header() {
  const size_t want = sizeof(FrameHeader) - header_got_;
  const ssize_t n = take(headers_[0] + header_got_, want);
  if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
  if (n <= 0) return close(outcome(Fault::BROKEN)), Step::GONE;
  heard_stream();
  header_got_ += uint32_t(n);
  if (header_got_ < sizeof(FrameHeader)) return Step::BLOCKED;
  return parse_header() ? Step::MORE : Step::GONE;
}

// As recv; what was received too far ahead comes first. Null: thrown away.
ssize_t ReadConn::take(uint8_t* into, size_t bytes) {
  if (!spilled()) {
    const ssize_t n = receive(into, bytes, into ? 0 : MSG_TRUNC);   // TCP throws the bytes away without copying them
    if (n > 0) net.stats.read_bytes_tcp.fetch_add(uint64_t(n), std::memory_order_relaxed);
    return n;
  }
  const size_t n = std::min(bytes, spill_.size() - spill_at_);
  if (into) std::memcpy(into, spill_.data() + spill_at_, n);
  spill_at_ += n;
  return ssize_t(n);
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
  verified_ = 0;
  discarding_ = false;
}

bool ReadConn::parse_header() {
  FrameHeader h;
  std::memcpy(&h, headers_[0], sizeof h);
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

ReadConn::Step ReadConn::discard() {
  const uint64_t rest = body_bytes_ - body_got_;
  const size_t want = size_t(std::min<uint64_t>(rest, 4 * STEP_BYTES));
  const bool from_spill = spilled();
  const ssize_t n = take(nullptr, want);
  if (n < 0 && errno == EAGAIN) return Step::BLOCKED;
  if (n <= 0) return close(outcome(Fault::BROKEN)), Step::GONE;
  heard_stream();
  body_got_ += uint64_t(n);
  if (body_got_ == body_bytes_) next_item();
  return size_t(n) < want && !from_spill ? Step::BLOCKED : Step::MORE;
}

// One receive into the places of the item that is due and of those after it: their headers are taken for granted, since nearly all say
// the same. Where one does not, what came after it is kept aside, and the stream is read item by item from there.
ReadConn::Step ReadConn::scatter() {
  auto stream = stream_;   // finish() lets go of it
  LoadJob& job = *stream->job;
  const auto& items = stream->items;
  LoadJob::Target to[ITEMS_AHEAD];
  size_t begins[ITEMS_AHEAD];   // where in this receive each body begins
  iovec iov[IOV_PARTS];
  int parts = 0;
  size_t want = 0;
  auto part = [&](uint8_t* at, size_t bytes) {
    iov[parts++] = {at, bytes};
    want += bytes;
  };
  const uint32_t first = item_;
  uint32_t claimed = 0;
  const bool ahead = ahead_ && !spilled();
  bool whole = true;   // the last item's body ends within this receive
  while (whole && claimed < ITEMS_AHEAD && first + claimed < asked_ && want < STEP_BYTES && (claimed == 0 || ahead)) {
    const Stream::Item& item = items[first + claimed];
    const uint32_t blocks = job.blocks(item), piece = job.piece_bytes(item);
    if (claimed && parts + int(blocks) + 4 > IOV_PARTS) break;
    if (!job.claim(item, claimed || !body_got_, tails_[claimed], to[claimed])) break;
    const LoadJob::Target& t = to[claimed];
    if (claimed) part(headers_[claimed], sizeof(FrameHeader));
    begins[claimed] = want;
    const uint64_t body = job.body_bytes(item), checks_bytes = 24ull * blocks;
    uint64_t at = claimed ? 0 : body_got_;
    if (at < checks_bytes) {
      part(t.checks + at, size_t(checks_bytes - at));
      at = checks_bytes;
    }
    while (at < body && want < STEP_BYTES) {
      const uint64_t in_pieces = at - checks_bytes;
      const uint32_t block = uint32_t(in_pieces / piece), skip = uint32_t(in_pieces % piece);
      uint64_t run = piece - skip;
      if (piece > STEP_BYTES / 2) run = std::min<uint64_t>(run, STEP_BYTES - want);
      if (t.stride == piece) run = std::min<uint64_t>(body - at, std::max<uint64_t>(run, STEP_BYTES - want));
      part(t.base + block * t.stride + skip, size_t(run));
      at += run;
    }
    whole = at == body;
    claimed++;
  }
  if (claimed == 0) {
    discarding_ = true;
    return Step::MORE;
  }
  if (whole && first + claimed < asked_) part(headers_[claimed], sizeof(FrameHeader));

  if (to[0].mixed) verified_ = 0;
  const bool from_spill = spilled();
  const ssize_t n = pull(iov, parts);
  if (n <= 0) {
    const bool again = n < 0 && errno == EAGAIN;
    for (uint32_t i = 0; i < claimed; i++) job.release(items[first + i], LoadJob::Got::PART, false);
    if (again) return Step::BLOCKED;
    close(outcome(Fault::BROKEN));
    return Step::GONE;
  }
  heard_stream();
  size_t left = size_t(n);
  uint32_t done = 0;   // items that need no further byte of this receive
  bool header_whole = false;
  while (left && done <= claimed) {
    if (header_got_ < sizeof(FrameHeader)) {
      const size_t got = std::min(left, sizeof(FrameHeader) - header_got_);
      header_got_ += uint32_t(got);
      left -= got;
      if (header_got_ < sizeof(FrameHeader)) break;
      FrameHeader h;
      std::memcpy(&h, headers_[done], sizeof h);
      header_whole = done == claimed || !announces_item(h);
      if (header_whole) break;
      begin_body();
    }
    const Stream::Item& item = items[item_];
    const uint64_t checks_bytes = 24ull * job.blocks(item), got = std::min<uint64_t>(left, body_bytes_ - body_got_);
    body_got_ += got;
    left -= size_t(got);
    const uint32_t pieces = body_got_ > checks_bytes ? uint32_t((body_got_ - checks_bytes) / job.piece_bytes(item)) : 0;
    const bool good = job.verify(item, to[done], verified_, pieces);
    const bool ended = body_got_ == body_bytes_;
    verified_ = pieces;
    if (good && !ended) break;
    if (good && job.is_cut(item)) job.copy_tail(item, tails_[done].data());
    job.release(item, good ? LoadJob::Got::WHOLE : LoadJob::Got::BAD, true);
    done++;
    discarding_ = !ended;
    if (!ended) break;
    next_item();
  }
  if (done && header_got_ && !discarding_) std::memmove(headers_[0], headers_[done], header_got_);
  if (done && done < claimed) tails_[0].swap(tails_[done]);   // goes on there
  if (left) {   // not what was expected: the rest goes aside before its places are let go
    ahead_ = false;
    keep_aside(iov, size_t(n) - left, left);
  }
  for (uint32_t i = done; i < claimed; i++) job.release(items[first + i], LoadJob::Got::PART, begins[i] < size_t(n));
  if (!stream_) return Step::BLOCKED;
  if (header_whole && !parse_header()) return Step::GONE;
  return size_t(n) < want && !from_spill && !spilled() ? Step::BLOCKED : Step::MORE;
}

// As recvmsg; what was received too far ahead comes first.
ssize_t ReadConn::pull(iovec* iov, int parts) {
  if (spilled()) {
    size_t n = 0;
    for (int i = 0; i < parts && spilled(); i++) n += size_t(take(static_cast<uint8_t*>(iov[i].iov_base), iov[i].iov_len));
    return ssize_t(n);
  }
  msghdr message{};
  message.msg_iov = iov;
  message.msg_iovlen = size_t(parts);
  ssize_t n;
  do n = recvmsg(fd_, &message, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n > 0) {
    net.stats.bytes_received.fetch_add(uint64_t(n), std::memory_order_relaxed);
    net.stats.read_bytes_tcp.fetch_add(uint64_t(n), std::memory_order_relaxed);
  }
  return n;
}

// Bytes [skip, skip + bytes) of what a receive brought, in front of what is aside already.
void ReadConn::keep_aside(const iovec* iov, size_t skip, size_t bytes) {
  std::vector<uint8_t> kept;
  kept.reserve(bytes);
  for (; bytes; iov++) {
    const size_t n = iov->iov_len > skip ? std::min(iov->iov_len - skip, bytes) : 0;
    const auto* at = static_cast<const uint8_t*>(iov->iov_base) + skip;
    if (n) kept.insert(kept.end(), at, at + n);
    skip -= std::min(skip, iov->iov_len);
    bytes -= n;
  }
  kept.insert(kept.end(), spill_.begin() + ptrdiff_t(spill_at_), spill_.end());
  spill_ = std::move(kept);
  spill_at_ = 0;
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
  if (spilled()) return broke_protocol();   // more than was asked
  node.heard();   // owes nothing: it may have been called late between its last byte and this
  stream_ = nullptr;
  idle_since_ns_ = now_ns();
  reused_ = true;
  draining_ = false;
  for (auto& tail : tails_) tail = {};   // a kept connection holds no memory
  spill_ = {};
  spill_at_ = 0;
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
  const int64_t quiet = now - last_heard_ns_;
  if (draining_ && now - drain_since_ns_ > net.config.drain_timeout_ns)
    close(outcome(quiet > net.config.drain_timeout_ns ? Fault::STALLED : Fault::CANCELLED));
  else if (item_ < asked_ && quiet > net.config.stall_timeout_ns)
    close(outcome(Fault::STALLED));
  return true;
}

}  // namespace kv::client
