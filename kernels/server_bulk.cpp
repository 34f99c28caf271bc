// READ and WRITE.
#include "server_bulk.hpp"

#include <errno.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

namespace kv {
namespace {
constexpr int64_t TURN_BYTES = 2 << 20;             // a connection's turn, then the next one's
constexpr int64_t OPEN_COST_BYTES = 16 << 10;       // opening an extent counts as this much of a turn
constexpr uint32_t OPEN_AHEAD = 1;                  // extents behind the one that is sent: the first bytes leave before all are open
constexpr size_t REQUESTS_MAX = 64;                 // read ahead per connection
constexpr uint64_t READ_ASK_BYTES_MAX = 64 << 20;   // held for READs of all connections; past it one request each
constexpr size_t BATCH_BYTES = 128 << 10;           // small items and replies are gathered up to this
constexpr size_t PUTS_MAX = 64;                     // in one commit: about a millisecond
}  // namespace

BulkLoop::BulkLoop(ServerShared& shared, ReadService& reads) : Loop(shared), shared_(shared) {
  engine_ = reads.engine([this](uint64_t conn, uint64_t serial) {
    Message m;
    m.kind = Message::Kind::READ_DONE;
    m.conn = conn;
    m.serial = serial;
    post(std::move(m));
  });
}

Loop::Turn BulkLoop::serve(Conn& conn) {
  BulkState& b = *conn.bulk;
  int64_t budget = TURN_BYTES;
  if (b.verbs && !reap(conn)) {
    add(shared_.stats.verbs_failed);
    return Turn::CLOSE;
  }
  while (budget > 0) {
    const Step sent = send_some(conn, budget);
    if (sent == Step::DEAD) return Turn::CLOSE;
    if (conn.phase >= Phase::CLOSING) return finish(conn);
    const Step received = receive_some(conn, budget);
    if (received == Step::DEAD) return Turn::CLOSE;
    if (misplaced(conn)) {
      Message message;
      message.kind = Message::Kind::ADOPT;
      message.adopted = release(conn);
      others_[next_other_++ % others_.size()]->post(std::move(message));
      return Turn::MOVED;
    }
    const bool by_rdma = b.verbs || (b.verbs_settled && !b.verbs_settled->load());   // or will be
    if (conn.eof && (by_rdma || b.requests.empty()) && !conn.pending()) return Turn::CLOSE;
    if (by_rdma && conn.hangup) return Turn::CLOSE;   // what it asked for it will not take
    if (sent == Step::STUCK && received == Step::STUCK) return Turn::REST;
  }
  return Turn::AGAIN;
}

void BulkLoop::on_message(Message& m) {
  if (m.kind == Message::Kind::WAKE) wake_hungry();
  Conn* conn = find(m.conn);
  if (m.kind == Message::Kind::VERBS_READY) on_verbs_ready(conn, m);
  if (!conn) return;
  if (m.kind == Message::Kind::READ_DONE) conn->bulk->waiting = false;
  make_ready(*conn);
}

void BulkLoop::on_closed(Conn& conn) {
  end_verbs(conn);
  for (auto& r : conn.bulk->requests) {
    sub(shared_.stats.queued[uint32_t(op_of(r.header.verb))]);
    if (r.read) r.read->dropped.store(true);
  }
  sub(shared_.inflight, conn.bulk->requests.size());
}

bool BulkLoop::owes_by_rdma(const BulkState& b) { return b.verbs && (b.verbs->starved || !b.verbs->posted.empty()); }   // credits, acknowledgements

bool BulkLoop::owes(const Conn& conn) const {
  const BulkState& b = *conn.bulk;
  if (conn.pending() || b.tail.bytes) return true;                       // room
  if (owes_by_rdma(b)) return true;
  if (!b.requests.empty() && !wants_input(conn)) return false;           // our turn
  return b.input != BulkState::Input::HEADER ? b.input != BulkState::Input::STOPPED : b.got > 0;   // the rest of a frame
}
bool BulkLoop::idle(const Conn& conn) const { return conn.bulk->requests.empty(); }

// --- output ---

BulkLoop::Step BulkLoop::send_some(Conn& conn, int64_t& budget) {
  BulkState& b = *conn.bulk;
  bool moved = false;
  for (;;) {
    if (conn.pending() > BATCH_BYTES || b.tail.bytes) {
      const Step step = send_tail(conn, budget);
      if (step != Step::MOVED) return step == Step::STUCK && moved ? Step::MOVED : step;
      moved = true;
      if (budget <= 0) return Step::MOVED;
      continue;
    }
    if (b.requests.empty() || b.waiting || conn.phase >= Phase::CLOSING) break;
    BulkRequest& front = b.requests.front();
    if (!front.read) {
      if (!front.done) break;
      if (front.verbs_reply) {
        const auto* p = reinterpret_cast<const uint8_t*>(&*front.verbs_reply);
        append_header(conn.out, front.header, wire::Kind::REPLY, Status::OK, sizeof(wire::VerbsOpen), wire::body_check(p, sizeof(wire::VerbsOpen)), 0);
        conn.out.insert(conn.out.end(), p, p + sizeof(wire::VerbsOpen));
      } else {
        append_bare(conn.out, front.header, front.status, front.status == Status::STALE_MAP ? uint32_t(shared_.epoch.load()) : 0);
      }
      answered(conn);
      moved = true;
      continue;
    }
    const bool by_rdma = wire::Verb(front.header.verb) == wire::Verb::VERBS_READ;
    const Step step = by_rdma ? write_items(conn, front, budget) : send_items(conn, front, budget);
    if (step == Step::DEAD) return step;
    if (step == Step::STUCK) break;
    moved = true;
    if (budget <= 0) return Step::MOVED;
  }
  if (conn.pending()) {
    const Step step = send_tail(conn, budget);
    if (step != Step::STUCK) return step;
  }
  return moved ? Step::MOVED : Step::STUCK;
}

// Prepares the next item (or the end) of a READ; STUCK: it waits for its engine.
BulkLoop::Step BulkLoop::send_items(Conn& conn, BulkRequest& request, int64_t& budget) {
  BulkState& b = *conn.bulk;
  ReadJob& job = *request.read;
  if (b.item_open) {   // its last byte is in the socket
    b.item_open = false;
    engine_->sent(request.read, job.next);
    ExtentRead& e = job.extents[job.items[job.next].extent];
    job.next++;
    if (--e.items_left == 0) job.close_extent(e);
  }
  if (job.next == job.items.size()) {
    request.status = Status::OK;
    engine_->finished(job);
    answered(conn);
    return Step::MOVED;
  }
  const uint32_t extent = job.items[job.next].extent;
  open_extents(request.read, extent + 1 + OPEN_AHEAD, budget);
  if (job.opened <= extent) return Step::MOVED;   // the turn went into opening
  Status status = Status::OK;
  Source source;
  if (engine_->fetch(request.read, job.next, status, source) != Fetch::READY) {   // one at a time: never LATER
    open_extents(request.read, uint32_t(job.extents.size()), budget);   // the disk may be asked for them meanwhile
    b.waiting = true;
    return Step::STUCK;
  }
  add(shared_.stats.read_items[uint32_t(status)]);
  b.item_open = true;
  if (status != Status::OK) {
    append_header(conn.out, request.header, wire::Kind::ITEM, status, 0, 0, job.next);
    return Step::MOVED;
  }
  const ExtentRead& e = job.extents[extent];
  const uint32_t blocks = e.ask.block_count, plane = job.items[job.next].plane;
  append_header(conn.out, request.header, wire::Kind::ITEM, Status::OK, uint32_t(24ull * blocks + source.bytes), 0, job.next);
  const auto* sums = reinterpret_cast<const uint8_t*>(e.view().sums(plane) + e.ask.first_block);
  const auto* digests = reinterpret_cast<const uint8_t*>(e.view().digests(plane) + e.ask.first_block);
  conn.out.insert(conn.out.end(), sums, sums + 8ull * blocks);
  conn.out.insert(conn.out.end(), digests, digests + 16ull * blocks);
  if (source.memory && source.bytes <= COPY_BYTES) conn.out.insert(conn.out.end(), source.memory, source.memory + source.bytes);
  else b.tail = source;
  return Step::MOVED;
}

// Sends conn.out and then the open item's piece, as far as the socket takes them.
BulkLoop::Step BulkLoop::send_tail(Conn& conn, int64_t& budget) {
  BulkState& b = *conn.bulk;
  if (!conn.writable) return Step::STUCK;
  Source& t = b.tail;
  const size_t before = conn.pending();
  if (before && t.memory && t.bytes) {   // header and piece in one go
    iovec parts[2] = {{conn.out.data() + conn.out_at, before}, {const_cast<uint8_t*>(t.memory), t.bytes}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(conn.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (dead(errno)) return Step::DEAD;
      if (errno == EAGAIN) conn.writable = false;
      return Step::STUCK;
    }
    const size_t head = std::min(size_t(n), before);
    conn.out_at += head;
    t.memory += size_t(n) - head;
    t.bytes -= size_t(n) - head;
    conn.moved(uint64_t(n));
    budget -= n;
    add(shared_.stats.bytes_out, uint64_t(n));
    if (conn.pending()) return Step::MOVED;
    conn.out.clear();
    conn.out_at = 0;
    return Step::MOVED;
  }
  if (before) {
    if (!flush(conn, t.bytes > 0)) return Step::DEAD;
    budget -= int64_t(before - conn.pending());
    if (conn.pending()) return before == conn.pending() ? Step::STUCK : Step::MOVED;
  }
  while (t.bytes && budget > 0) {
    ssize_t n;
    if (t.memory) {
      n = send(conn.fd, t.memory, t.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      off_t at = off_t(t.offset);
      n = sendfile(conn.fd, t.fd, &at, std::min(t.bytes, uint64_t(TURN_BYTES)));
      if (n == 0) return Step::DEAD;   // the file ends inside the piece: the answer cannot be finished
    }
    if (n < 0) {
      if (dead(errno)) return Step::DEAD;   // the peer, or the disk in mid-piece
      if (errno == EINTR) continue;
      conn.writable = false;
      return before ? Step::MOVED : Step::STUCK;
    }
    if (t.memory) t.memory += n;
    else t.offset += uint64_t(n);
    t.bytes -= uint64_t(n);
    conn.moved(uint64_t(n));
    budget -= n;
    add(shared_.stats.bytes_out, uint64_t(n));
  }
  return Step::MOVED;
}

void BulkLoop::open_extents(const std::shared_ptr<ReadJob>& job, uint32_t end, int64_t& budget) {
  const uint32_t first = job->opened;
  end = std::min(end, uint32_t(job->extents.size()));
  if (first >= end) return;
  while (job->opened < end && (budget > 0 || job->opened == first)) {
    ExtentRead& e = job->extents[job->opened++];
    budget -= OPEN_COST_BYTES;
    if (!e.items_left) continue;   // nobody asks for it: it is not held open
    e.status = Status::INTERNAL;
    try {
      e.status = shared_.store.open_read(job->owner, e.ask, e.ref);
    } catch (const std::exception&) {
      add(shared_.stats.faults);
    }
  }
  engine_->opened(job, first, job->opened);
}

void BulkLoop::answered(Conn& conn) {
  BulkState& b = *conn.bulk;
  BulkRequest& front = b.requests.front();
  const Op op = op_of(front.header.verb);
  shared_.stats.answered(op, front.status, front.born_ns);
  sub(shared_.stats.queued[uint32_t(op)]);
  sub(shared_.inflight);
  if (front.last) conn.phase = Phase::CLOSING;
  b.requests.pop_front();
  conn.used_ns = now_ns();
}

// --- input ---

bool BulkLoop::wants_input(const Conn& conn) const {
  const BulkState& b = *conn.bulk;
  if (conn.eof || b.input == BulkState::Input::STOPPED) return false;
  if (for_others(conn)) return false;   // first what was asked before is answered
  if (b.input != BulkState::Input::HEADER || b.got) return true;
  if (b.requests.empty()) return true;
  return b.requests.size() < REQUESTS_MAX && shared_.read_ask_bytes < READ_ASK_BYTES_MAX;
}

// Is the frame whose header came of a kind that another thread is for? A connection by RDMA stays where its memory is.
bool BulkLoop::for_others(const Conn& conn) const {
  const BulkState& b = *conn.bulk;
  if (b.verbs || others_.empty()) return false;
  const bool record = b.input == BulkState::Input::RECORD || b.input == BulkState::Input::DISCARD;
  const bool ask = b.input == BulkState::Input::READ_BODY || b.input == BulkState::Input::VERBS_BODY;
  return engine_ ? record : ask;
}

// At most `want` bytes into `to`, what the small loop left over first.
BulkLoop::Step BulkLoop::take(Conn& conn, uint8_t* to, uint64_t want, int64_t& budget) {
  BulkState& b = *conn.bulk;
  const size_t left = conn.in.size() - conn.in_at;
  if (left) {
    const size_t n = std::min<uint64_t>(left, want);
    if (to) std::memcpy(to, conn.in.data() + conn.in_at, n);
    conn.in_at += n;
    if (conn.in_at == conn.in.size()) {
      conn.in = {};
      conn.in_at = 0;
    }
    b.got += n;
    return Step::MOVED;
  }
  if (!conn.readable) return Step::STUCK;
  const ssize_t n = recv(conn.fd, to, std::min<uint64_t>(want, TURN_BYTES), MSG_DONTWAIT | (to ? 0 : MSG_TRUNC));
  if (n < 0) {
    if (dead(errno)) return Step::DEAD;
    if (errno == EINTR) return Step::MOVED;
    conn.readable = false;
    return Step::STUCK;
  }
  if (n == 0) {
    conn.eof = true;
    return Step::STUCK;
  }
  b.got += uint64_t(n);
  if (!owes_by_rdma(b)) conn.moved(uint64_t(n));   // else it would buy itself time for the pool's memory by talking
  budget -= n;
  add(shared_.stats.bytes_in, uint64_t(n));
  return Step::MOVED;
}

BulkLoop::Step BulkLoop::receive_some(Conn& conn, int64_t& budget) {
  BulkState& b = *conn.bulk;
  bool moved = false;
  while (budget > 0 && wants_input(conn)) {
    uint8_t* to = nullptr;
    uint64_t size = b.header.body_bytes;
    switch (b.input) {
      case BulkState::Input::HEADER:
        to = reinterpret_cast<uint8_t*>(&b.header);
        size = sizeof b.header;
        break;
      case BulkState::Input::READ_BODY:
      case BulkState::Input::VERBS_BODY: to = b.body.data(); break;
      case BulkState::Input::RECORD: to = b.record.data(); break;
      case BulkState::Input::DISCARD:
      case BulkState::Input::STOPPED: break;
    }
    if (b.got < size) {
      const bool first = b.input == BulkState::Input::HEADER && !b.got;
      const Step step = take(conn, to ? to + b.got : nullptr, size - b.got, budget);
      if (step == Step::DEAD) return step;
      if (step == Step::STUCK) break;
      moved = true;
      if (first) b.born_ns = now_ns();
      if (b.got < size) continue;
    }
    const auto part = b.input;
    b.got = 0;
    b.input = BulkState::Input::HEADER;
    moved = true;
    switch (part) {
      case BulkState::Input::HEADER: on_header(conn); break;
      case BulkState::Input::READ_BODY: on_read(conn); break;
      case BulkState::Input::VERBS_BODY: on_verbs_open(conn); break;
      case BulkState::Input::RECORD: on_record(conn); break;
      case BulkState::Input::DISCARD: {
        BulkRequest& r = enqueue(conn, b.header);
        r.done = true;
        r.status = b.refusal;
        break;
      }
      case BulkState::Input::STOPPED: break;
    }
    if (misplaced(conn)) break;
  }
  return moved ? Step::MOVED : Step::STUCK;
}

BulkRequest& BulkLoop::enqueue(Conn& conn, const wire::FrameHeader& header) {
  BulkState& b = *conn.bulk;
  BulkRequest& r = b.requests.emplace_back();
  r.header = header;
  r.serial = b.next_serial++;
  r.born_ns = b.born_ns;
  add(shared_.stats.queued[uint32_t(op_of(header.verb))]);
  add(shared_.inflight);
  return r;
}

void BulkLoop::refuse(Conn& conn, Status why) {
  add(shared_.stats.frames_malformed);
  BulkRequest& r = enqueue(conn, conn.bulk->header);
  r.done = r.last = true;
  r.status = why;
  conn.bulk->input = BulkState::Input::STOPPED;
}

void BulkLoop::on_header(Conn& conn) {
  BulkState& b = *conn.bulk;
  Status why = Status::OK;
  switch (check_header(b.header, conn, why)) {
    case HeaderCheck::NOT_OURS:   // out of step: nothing to answer, but what was asked before is still answered
      add(shared_.stats.frames_malformed);
      b.input = BulkState::Input::STOPPED;
      conn.eof = true;
      return;
    case HeaderCheck::REFUSED: refuse(conn, why); return;
    case HeaderCheck::OK: break;
  }
  const wire::Verb verb = wire::Verb(b.header.verb);
  if (verb != wire::Verb::WRITE) {
    b.body.resize(b.header.body_bytes);
    b.input = verb == wire::Verb::VERBS_OPEN ? BulkState::Input::VERBS_BODY : BulkState::Input::READ_BODY;
    return;
  }
  b.refusal = Status::OK;
  if (shared_.draining.load()) b.refusal = Status::DRAINING;
  else if (b.header.body_bytes > shared_.arena.capacity_bytes() - RECORD_ALIGN) b.refusal = Status::TOO_LARGE;
  else if (!(b.record = shared_.arena.take(align_up(b.header.body_bytes, RECORD_ALIGN)))) b.refusal = Status::BUSY;
  b.input = b.refusal == Status::OK ? BulkState::Input::RECORD : BulkState::Input::DISCARD;
}

void BulkLoop::on_record(Conn& conn) {
  BulkState& b = *conn.bulk;
  BulkRequest& r = enqueue(conn, b.header);
  const Arena::Buffer record = std::move(b.record);   // given back when it is written
  const RecordHead& head = RecordView{record.data()}.head();
  const uint64_t bytes = b.header.body_bytes;
  // Readers use the list of a record's own epoch, so a newer epoch than ours is fine (and tells us to look for it); a writer that is
  // behind would place extents where the map no longer wants them.
  r.status = Status::INTERNAL;
  std::unique_ptr<Put> put;
  if (bytes < sizeof(RecordHead)) {
    r.status = Status::BAD_REQUEST;
  } else if (head.magic == RECORD_MAGIC && head.write_epoch < shared_.epoch.load()) {
    r.status = Status::STALE_MAP;
  } else {
    try {
      put = shared_.store.write(record.data(), bytes, r.status);
    } catch (const std::exception&) {
      add(shared_.stats.faults);
    }
    if (put || r.status == Status::EXISTS) shared_.stats.saw_epoch(head.write_epoch);
  }
  r.done = !put;
  if (!put) return;
  put_for_.emplace_back(conn.id, r.serial);
  puts_.push_back(std::move(put));
  if (puts_.size() >= PUTS_MAX) commit();
}

void BulkLoop::commit() {
  if (puts_.empty()) return;
  try {
    shared_.store.commit(puts_);
  } catch (const std::exception&) {   // no memory: each put says itself whether it is known
    add(shared_.stats.faults);
  }
  for (size_t i = 0; i < puts_.size(); i++) {
    Conn* conn = find(put_for_[i].first);
    if (!conn) continue;   // gone meanwhile
    for (auto& r : conn->bulk->requests) {
      if (r.serial != put_for_[i].second) continue;
      r.done = true;
      r.status = puts_[i]->status;
      break;
    }
    make_ready(*conn);
  }
  puts_.clear();
  put_for_.clear();
}

void BulkLoop::on_read(Conn& conn) {
  BulkState& b = *conn.bulk;
  const uint8_t* body = b.body.data();
  const uint64_t bytes = b.body.size();
  const bool by_rdma = wire::Verb(b.header.verb) == wire::Verb::VERBS_READ;
  wire::VerbsRead head{};
  wire::ReadRequest& request = head.read;
  if (by_rdma) {
    if (!take_verbs_read(conn, head)) return;
  } else {
    if (bytes < sizeof request) return refuse(conn, Status::BAD_REQUEST);
    if (wire::body_check(body, bytes) != b.header.body_check) return refuse(conn, Status::CORRUPT);
    std::memcpy(&request, body, sizeof request);
  }
  const uint64_t head_bytes = by_rdma ? sizeof head : sizeof request, item_bytes = by_rdma ? sizeof(wire::VerbsItem) : sizeof(wire::ReadItem);
  if (request.extents > wire::READ_EXTENTS_MAX || request.items > wire::READ_ITEMS_MAX) return refuse(conn, Status::TOO_LARGE);
  const uint64_t items_at = head_bytes + uint64_t(request.extents) * sizeof(wire::ReadExtent);
  if (bytes != items_at + request.items * item_bytes) return refuse(conn, Status::BAD_REQUEST);
  if (by_rdma && !request.items) return;   // credits only: no answer

  auto job = std::make_shared<ReadJob>(shared_);
  std::memcpy(job->owner.data(), request.owner, OWNER_BYTES);
  job->ask_bytes = request.extents * sizeof(ExtentRead) + request.items * item_bytes;
  shared_.read_ask_bytes += job->ask_bytes;
  job->extents.resize(request.extents);
  for (uint32_t i = 0; i < request.extents; i++) {
    wire::ReadExtent& e = job->extents[i].ask;
    std::memcpy(&e, body + head_bytes + i * sizeof e, sizeof e);
    if (e.zero || e.zero2) return refuse(conn, Status::BAD_REQUEST);
  }
  job->items.resize(request.items);
  std::vector<VerbsPlace> places(by_rdma ? request.items : 0);
  for (uint32_t i = 0; i < request.items; i++) {
    wire::VerbsItem item{};   // a ReadItem is its front
    std::memcpy(&item, body + items_at + i * item_bytes, item_bytes);
    if (item.extent >= request.extents || item.zero) return refuse(conn, Status::BAD_REQUEST);
    job->items[i] = {item.extent, item.plane, 0};
    if (by_rdma) places[i] = {item.bytes, item.offset};
    job->extents[item.extent].items_left++;
  }
  shared_.stats.saw_epoch(request.epoch);
  BulkRequest& r = enqueue(conn, b.header);
  job->conn = conn.id;
  job->serial = r.serial;
  r.read = std::move(job);
  r.places = std::move(places);
  r.round = head.round;
  if (b.body.capacity() > (64 << 10)) b.body = {};
}

}  // namespace kv
