// Answers by RDMA. See server_verbs.hpp.
#include "server_verbs.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "segments.hpp"
#include "server_bulk.hpp"

namespace kv {
namespace {
constexpr uint32_t SENDS = 64;                  // work requests of a connection: what is in flight, and one kept free for a flush
constexpr uint32_t SIGNAL_EVERY = 8;            // items: the last of a request, and the last before a rest, are signalled in any case
constexpr uint64_t CHUNK_BYTES = 512 << 10;     // of one work request
constexpr uint32_t PROGRESS_BYTES_MIN = 4 << 10;  // a work request counts as this much at least: many are of no bytes
constexpr uint64_t FLYING_BYTES_MAX = 2 << 20;  // of one connection: a rack's bandwidth times its delay is less
}  // namespace

VerbsServer::VerbsServer(const ServerConfig& config)
    : device(verbs::Device::open(config.rdma_device, config.rdma_route)),
      pool_bytes(std::max(config.rdma_pool_bytes / config.bulk_threads, 4 * CHUNK_BYTES)),
      pairs_max(config.rdma_pairs_max) {}

void VerbsServer::share(const Arena& arena) {
  const uint64_t host_bytes = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
  if (arena.capacity_bytes() > host_bytes)   // the kernel would lock page after page until it kills somebody
    throw verbs::Fault("E147", "registering " + std::to_string(arena.capacity_bytes() >> 10) + " KiB with " + device->name,
                       "this host has " + std::to_string(host_bytes >> 10) + " KiB of memory", "smaller --rdma-memory and --read-memory");
  regions_.push_back(std::make_unique<verbs::Region>(device, arena.base(), arena.capacity_bytes(), 0));
}

void VerbsServer::close() {
  set_ups.stop();
  worker.stop();
  regions_.clear();
}

const ibv_mr* VerbsServer::region_of(const uint8_t* at) const {
  for (const auto& r : regions_) {
    const auto* from = static_cast<const uint8_t*>(r->mr()->addr);
    if (at >= from && at < from + r->mr()->length) return r->mr();
  }
  return nullptr;
}

Status VerbsServer::connect(const wire::VerbsOpen& peer, std::shared_ptr<verbs::Endpoint>& endpoint) {
  try {
    std::shared_ptr<verbs::Endpoint> made;
    {
      std::lock_guard lock(making_);
      if (device->queue_pairs.load() >= pairs_max) return Status::BUSY;
      made = std::make_shared<verbs::Endpoint>(device, verbs::Depths{SENDS, 0, 2}, 0);
    }
    std::string why;
    if (!made->connect(peer, why)) return Status::INTERNAL;
    endpoint = std::move(made);
    return Status::OK;
  } catch (const std::exception&) {   // the device has no more of something
    return Status::INTERNAL;
  }
}

// --- set-up and end ---

namespace {
// Whose turn a set-up is: the address that the connection comes from, without its port.
std::string host_of(int fd) {
  sockaddr_storage at{};
  socklen_t bytes = sizeof at;
  getpeername(fd, reinterpret_cast<sockaddr*>(&at), &bytes);
  const auto* a4 = reinterpret_cast<const sockaddr_in*>(&at);
  const auto* a6 = reinterpret_cast<const sockaddr_in6*>(&at);
  if (at.ss_family == AF_INET6) return {reinterpret_cast<const char*>(&a6->sin6_addr), sizeof a6->sin6_addr};
  return {reinterpret_cast<const char*>(&a4->sin_addr), sizeof a4->sin_addr};
}
}  // namespace

void BulkLoop::share_pool() {
  pool_ = std::make_unique<Arena>(shared_.verbs->pool_bytes, Pages::Use::PINNED);
  shared_.verbs->share(*pool_);
}

void BulkLoop::on_verbs_open(Conn& conn) {
  BulkState& b = *conn.bulk;
  wire::VerbsOpen peer;
  if (b.body.size() != sizeof peer) return refuse(conn, Status::BAD_REQUEST);
  if (wire::body_check(b.body.data(), sizeof peer) != b.header.body_check) return refuse(conn, Status::CORRUPT);
  std::memcpy(&peer, b.body.data(), sizeof peer);
  if (b.verbs_settled || !verbs::valid_peer(peer, true)) return refuse(conn, Status::BAD_REQUEST);
  b.verbs_settled = std::make_shared<std::atomic<bool>>(false);
  BulkRequest& r = enqueue(conn, b.header);
  VerbsServer* server = shared_.verbs;
  if (!server || shared_.draining.load()) {
    b.verbs_settled->store(true);
    r.done = true;
    r.status = server ? Status::DRAINING : Status::NOT_FOUND;
    return;
  }
  server->set_ups.run(host_of(conn.fd), [this, server, peer, id = conn.id, serial = r.serial, settled = b.verbs_settled] {
    if (settled->load()) return;   // its connection has gone: one that named nobody's address held up its host alone, and that is over
    Message m;
    m.kind = Message::Kind::VERBS_READY;
    m.conn = id;
    m.serial = serial;
    m.peer = peer;
    m.status = shared_.draining.load() ? Status::DRAINING : server->connect(peer, m.endpoint);
    post(std::move(m));
  });
}

void BulkLoop::on_verbs_ready(Conn* conn, Message& m) {
  add(m.status == Status::OK ? shared_.stats.verbs_opened : shared_.stats.verbs_refused);
  BulkRequest* asked = nullptr;
  if (conn)
    for (auto& r : conn->bulk->requests)
      if (r.serial == m.serial) asked = &r;
  if (!asked) {   // its connection went meanwhile
    if (m.endpoint) shared_.verbs->worker.run([gone = std::move(m.endpoint)]() mutable { gone.reset(); });
    return;
  }
  conn->bulk->verbs_settled->store(true);
  asked->done = true;
  asked->status = m.status;
  if (m.status != Status::OK) return;
  asked->verbs_reply = m.endpoint->address();
  auto state = std::make_unique<VerbsState>();
  state->endpoint = std::move(m.endpoint);
  state->peer = m.peer;
  state->credits = m.peer.credits;
  watch(state->endpoint->fd(), conn->id, true);
  conn->bulk->verbs = std::move(state);
}

void BulkLoop::end_verbs(Conn& conn) {
  if (conn.bulk->verbs_settled) conn.bulk->verbs_settled->store(true);
  std::shared_ptr<VerbsState> state = std::move(conn.bulk->verbs);
  if (!state) return;
  watch(state->endpoint->fd(), conn.id, false);
  shared_.verbs->worker.run([this, state]() mutable {
    state->endpoint.reset();   // from here on the device reads nothing of it
    state.reset();
    post({});                  // the pool has room again
  });
}

// --- VERBS_READ ---

// Takes the front of the body apart: what is of VERBS_READ alone. False: refused.
bool BulkLoop::take_verbs_read(Conn& conn, wire::VerbsRead& head) {
  BulkState& b = *conn.bulk;
  if (b.body.size() < sizeof head || !b.verbs) return refuse(conn, Status::BAD_REQUEST), false;
  if (wire::body_check(b.body.data(), b.body.size()) != b.header.body_check) return refuse(conn, Status::CORRUPT), false;
  std::memcpy(&head, b.body.data(), sizeof head);
  if (head.round > 0xff || head.credits > wire::VERBS_CREDITS_MAX - b.verbs->credits) return refuse(conn, Status::BAD_REQUEST), false;
  b.verbs->credits += head.credits;
  return true;
}

// Takes what has been done. False: the queue pair is at its end.
bool BulkLoop::reap(Conn& conn) {
  BulkState& b = *conn.bulk;
  VerbsState& v = *b.verbs;
  if (!v.endpoint->listen()) return false;
  ibv_wc found[32];
  bool freed = false;
  int n;
  while ((n = v.endpoint->poll(found, 32)) > 0) {
    for (int i = 0; i < n; i++) {
      if (found[i].status != IBV_WC_SUCCESS) return false;
      while (!v.posted.empty() && v.first_seq <= found[i].wr_id) {
        const VerbsState::Posted done = std::move(v.posted.front());
        v.posted.pop_front();
        v.first_seq++;
        v.flying_bytes -= done.bytes;
        conn.moved(std::max(done.bytes, PROGRESS_BYTES_MIN));
        add(shared_.stats.verbs_bytes, done.bytes);
        freed |= bool(done.buffer);
        if (!done.item_end) continue;
        ReadJob& job = *v.job;
        engine_->sent(v.job, job.next);
        ExtentRead& e = job.extents[job.items[job.next].extent];
        job.next++;
        if (--e.items_left == 0) job.close_extent(e);
      }
    }
  }
  if (freed) wake_hungry();
  return n == 0;
}

void BulkLoop::wake_hungry() {
  for (const uint64_t id : hungry_)
    if (Conn* other = find(id)) make_ready(*other);
  hungry_.clear();
}

bool BulkLoop::submit(VerbsState& v, ibv_send_wr& wr, VerbsState::Posted posted) {
  wr.wr_id = v.first_seq + v.posted.size();
  wr.wr.rdma.rkey = v.peer.rkey;
  v.unsignalled = wr.send_flags & IBV_SEND_SIGNALED ? 0 : v.unsignalled + 1;
  v.flying_bytes += posted.bytes;
  v.posted.push_back(std::move(posted));
  return v.endpoint->post_send(&wr);
}

// Nothing more can be posted now: what was posted without a signal is told by a write of no bytes, or its memory would be held for ever.
BulkLoop::Step BulkLoop::rest(VerbsState& v) {
  if (!v.unsignalled) return Step::STUCK;
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = v.peer.zone_addr;
  return submit(v, wr, {}) ? Step::STUCK : Step::DEAD;
}

// Posts the next item of a VERBS_READ, or a part of it; STUCK: it waits for its engine, for memory, or for the peer.
BulkLoop::Step BulkLoop::write_items(Conn& conn, BulkRequest& request, int64_t& budget) {
  BulkState& b = *conn.bulk;
  VerbsState& v = *b.verbs;
  if (v.job != request.read) {
    v.job = request.read;
    v.item = 0;
  }
  ReadJob& job = *v.job;
  v.starved = false;
  if (job.next == job.items.size()) {
    request.status = Status::OK;
    engine_->finished(job);
    v.job = nullptr;
    answered(conn);
    return Step::MOVED;
  }
  v.starved = v.item == job.items.size() || (!v.open && !v.credits) || v.posted.size() + 1 >= SENDS || v.flying_bytes >= FLYING_BYTES_MAX;
  if (v.starved) return rest(v);
  const uint32_t extent = job.items[v.item].extent;
  open_extents(v.job, uint32_t(job.extents.size()), budget);
  if (job.opened <= extent) return Step::MOVED;
  const VerbsPlace place = request.places[v.item];
  if (!v.open) {
    Status status = Status::OK;
    v.source = {};
    switch (engine_->fetch(v.job, v.item, status, v.source)) {
      case Fetch::WAIT: b.waiting = true; return rest(v);
      case Fetch::LATER: v.starved = true; return rest(v);   // when some of what is posted is done
      case Fetch::READY: break;
    }
    const uint64_t body = 24ull * job.extents[extent].ask.block_count + v.source.bytes;
    if (status == Status::OK && (body != place.bytes || uint64_t(place.offset) + body > v.peer.zone_bytes)) status = Status::BAD_REQUEST;
    if (status != Status::OK) return tell(v, request, status);
    v.open = true;
    v.at = 0;
  }
  return write_part(conn, request, place, budget);
}

// The item's end, without a body.
BulkLoop::Step BulkLoop::tell(VerbsState& v, const BulkRequest& request, Status status) {
  add(shared_.stats.read_items[uint32_t(status)]);
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.wr.rdma.remote_addr = v.peer.zone_addr;
  return end_item(v, request, status, wr, {});
}

BulkLoop::Step BulkLoop::end_item(VerbsState& v, const BulkRequest& request, Status status, ibv_send_wr& wr, VerbsState::Posted posted) {
  wr.imm_data = htonl(wire::verbs_immediate(uint32_t(status), request.round, v.item));
  v.credits--;
  v.open = false;
  v.item++;
  posted.item_end = true;
  if (v.unsignalled + 1 >= SIGNAL_EVERY || v.item == v.job->items.size()) wr.send_flags = IBV_SEND_SIGNALED;
  return submit(v, wr, std::move(posted)) ? Step::MOVED : Step::DEAD;
}

// One work request of the open item: checks and what follows them, or the next run of its pieces.
BulkLoop::Step BulkLoop::write_part(Conn& conn, BulkRequest& request, VerbsPlace place, int64_t& budget) {
  VerbsState& v = *conn.bulk->verbs;
  const ExtentRead& e = v.job->extents[v.job->items[v.item].extent];
  const uint32_t blocks = e.ask.block_count, plane = v.job->items[v.item].plane;
  const uint32_t checks = v.at ? 0 : 24 * blocks;
  const uint32_t run = uint32_t(std::min(v.source.bytes, std::min(CHUNK_BYTES, shared_.verbs->device->message_bytes_max - checks)));
  const ibv_mr* there = v.source.memory && run > COPY_BYTES ? shared_.verbs->region_of(v.source.memory) : nullptr;
  const uint32_t copied = checks + (there ? 0 : run);
  VerbsState::Posted posted;
  posted.bytes = checks + run;
  ibv_sge parts[2];
  int count = 0;
  if (copied) {
    posted.buffer = pool_->take(copied);
    if (!posted.buffer) {
      hungry_.insert(conn.id);
      v.open = v.at > 0;   // a small piece in memory is another's after the next fetch
      return rest(v);
    }
    uint8_t* to = posted.buffer.data();
    if (checks) {
      std::memcpy(to, e.view().sums(plane) + e.ask.first_block, 8ull * blocks);
      std::memcpy(to + 8ull * blocks, e.view().digests(plane) + e.ask.first_block, 16ull * blocks);
    }
    if (!there && run) {
      if (v.source.memory) std::memcpy(to + checks, v.source.memory, run);
      else if (!SegmentFiles::read_all(v.source.fd, to + checks, run, v.source.offset))
        return tell(v, request, errno == ENODATA ? Status::CORRUPT : Status::IO_ERROR);   // what was written before is not looked at
    }
    parts[count++] = {reinterpret_cast<uint64_t>(to), copied, shared_.verbs->region_of(to)->lkey};
  }
  if (there) parts[count++] = {reinterpret_cast<uint64_t>(v.source.memory), run, there->lkey};
  ibv_send_wr wr{};
  wr.sg_list = parts;
  wr.num_sge = count;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.wr.rdma.remote_addr = v.peer.zone_addr + place.offset + v.at;
  v.at += posted.bytes;
  v.source.bytes -= run;
  v.source.offset += run;
  if (v.source.memory) v.source.memory += run;
  budget -= posted.bytes;
  if (v.source.bytes) return submit(v, wr, std::move(posted)) ? Step::MOVED : Step::DEAD;
  add(shared_.stats.read_items[uint32_t(Status::OK)]);
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  return end_item(v, request, Status::OK, wr, std::move(posted));
}

}  // namespace kv
