// ReadConn by RDMA: its landing zone, what it asks for, what has come. See client_load.hpp, verbs.hpp and docs/PROTOCOL.md (RDMA).
//
// A body lands in the zone, never in the destination: from there it is copied to its place, under the place's claim, and checked there. So what
// a peer writes to the zone late, twice or out of malice changes no byte that was handed on.
#include <arpa/inet.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "client_load.hpp"
#include "verbs.hpp"

namespace kv::client {

using wire::FrameHeader;
using LinkState = VerbsLink::State;

namespace {
constexpr int COMPLETIONS = 4;   // taken at a time; an item is up to a megabyte
constexpr int TURNS = 4;         // then other connections of the loop

bool known(uint32_t status) { return (status >= 1 && status <= 7) || (status >= 20 && status <= 26) || (status >= 40 && status <= 42); }

std::string address_text(const Node& node) {
  char host[INET6_ADDRSTRLEN] = "?";
  const auto& at = node.address.storage;
  const bool v6 = at.ss_family == AF_INET6;
  const auto* a6 = reinterpret_cast<const sockaddr_in6*>(&at);
  const auto* a4 = reinterpret_cast<const sockaddr_in*>(&at);
  inet_ntop(at.ss_family, v6 ? static_cast<const void*>(&a6->sin6_addr) : &a4->sin_addr, host, sizeof host);
  char text[INET6_ADDRSTRLEN + 16];
  snprintf(text, sizeof text, v6 ? "[%s]:%u" : "%s:%u", host, unsigned(ntohs(v6 ? a6->sin6_port : a4->sin_port)));
  return text;
}
}  // namespace

bool ReadConn::fits_zone(const Net& net, uint64_t body_bytes) { return net.zones && align_up(body_bytes, ZONE_ALIGN) <= net.zones->zone_bytes; }

// --- from HELLO to the first VERBS_READ ---

void ReadConn::make_landing() {
  auto self = std::static_pointer_cast<ReadConn>(shared_from_this());
  net.worker->run([self, pool = net.zones, credits = net.config.rdma_credits] {
    std::shared_ptr<verbs::Landing> landing;
    std::string why;
    bool limit = false;
    try {
      landing = verbs::Landing::create(pool, credits);
      limit = !landing;
    } catch (const std::exception& fault) {
      why = fault.what();
    }
    self->loop.post([self, landing = std::move(landing), why, limit]() mutable { self->landed(std::move(landing), why, limit); });
  });
}

void ReadConn::landed(std::shared_ptr<verbs::Landing> landing, const std::string& why, bool limit) {
  if (landing && state() != State::CLOSED && link_) {
    net.stats.rdma_connections++;
    link_->landing = std::move(landing);
    link_->state = LinkState::ASKED;
    link_->request_id = net.next_id();
    const wire::VerbsOpen open = link_->landing->address();
    link_->credits = open.credits;
    const auto header = request_header(wire::Verb::VERBS_OPEN, link_->request_id, sizeof open, wire::body_check(&open, sizeof open));
    std::vector<uint8_t> frame(sizeof header + sizeof open);
    std::memcpy(frame.data(), &header, sizeof header);
    std::memcpy(frame.data() + sizeof header, &open, sizeof open);
    send_bytes(frame);
    return;
  }
  if (landing) net.worker->run([landing = std::move(landing)] {});
  if (state() == State::CLOSED || !link_) return;
  net.rdma_after_ns.store(now_ns() + (limit ? SECOND : net.config.rdma_retry_ns), std::memory_order_relaxed);
  if (limit) no_rdma("limit", "all landing zones are in use (rdma_pool_bytes)", true);
  else no_rdma("fault", why, true);
}

// The answer to VERBS_OPEN. False: closed, or not whole yet.
bool ReadConn::read_answer() {
  VerbsLink& v = *link_;
  while (v.answer_got < sizeof v.answer) {
    const size_t want = (v.answer_got < sizeof(FrameHeader) ? sizeof(FrameHeader) : sizeof v.answer) - v.answer_got;
    const ssize_t n = receive(v.answer + v.answer_got, want);
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) return over_tcp_elsewhere("ended", "it ended the connection when asked for RDMA"), false;
    v.answer_got += uint32_t(n);
    heard(now_ns());
    if (v.answer_got != sizeof(FrameHeader)) continue;
    FrameHeader h;
    std::memcpy(&h, v.answer, sizeof h);
    if (h.magic != wire::MAGIC || h.version != wire::VERSION || h.verb != uint8_t(wire::Verb::VERBS_OPEN) || h.kind != uint8_t(wire::Kind::REPLY) ||
        h.request_id != v.request_id || h.aux || (h.status ? h.body_bytes != 0 : h.body_bytes != sizeof(wire::VerbsOpen)))
      return broke_protocol(), false;
    if (h.status == uint32_t(Status::BAD_REQUEST) || h.status == uint32_t(Status::BAD_VERSION))   // it closes: an older daemon
      return over_tcp_elsewhere("older", "it does not speak RDMA"), false;
    if (!h.status) continue;
    const bool busy = h.status == uint32_t(Status::BUSY);
    no_rdma(busy ? "busy" : "refused", h.status == uint32_t(Status::NOT_FOUND) ? "it has no RDMA device" : busy ? "it is at a limit of RDMA connections"
                                                                           : "it refuses RDMA (status " + std::to_string(h.status) + ")", false);
    return false;
  }
  return true;
}

void ReadConn::connected(bool fine, const std::string& why) {
  if (state() == State::CLOSED || !link_ || link_->state != LinkState::CONNECTING) return;
  if (!fine) return over_tcp_elsewhere("route", why);
  verbs::Landing& landing = *link_->landing;
  if (!loop.watch(landing.endpoint().fd(), id)) return over_tcp_elsewhere("watch", "its completion channel cannot be watched");
  link_->watched = true;
  link_->state = LinkState::BINDING;
  if (!landing.by_window()) ready();
}

void ReadConn::ready() {
  link_->state = LinkState::READY;
  if (stream_) ask();
}

// What TCP says on a connection whose items come by RDMA: the answer to VERBS_OPEN, a refusal, the end.
void ReadConn::read_tcp() {
  if (link_->state == LinkState::ASKED) {
    if (!read_answer()) return;
    wire::VerbsOpen peer;
    FrameHeader h;
    std::memcpy(&h, link_->answer, sizeof h);
    std::memcpy(&peer, link_->answer + sizeof h, sizeof peer);
    if (h.body_check != wire::body_check(&peer, sizeof peer) || !verbs::valid_peer(peer, false)) return broke_protocol();
    link_->state = LinkState::CONNECTING;
    auto self = std::static_pointer_cast<ReadConn>(shared_from_this());
    net.worker->run([self, landing = link_->landing, peer] {
      std::string why;
      const bool fine = landing->connect(peer, why);
      self->loop.post([self, fine, why] { self->connected(fine, why); });
    });
  }
  uint8_t refusal[sizeof(FrameHeader)];
  const ssize_t n = receive(refusal, sizeof refusal, MSG_PEEK);
  if (n < 0 && errno == EAGAIN) return;
  if (n <= 0) {
    if (link_->watched) take_completions(true);   // what came before the end counts
    if (state() != State::CLOSED) close(outcome(stream_ ? Fault::BROKEN : Fault::CANCELLED));
    return;
  }
  FrameHeader h{};
  std::memcpy(&h, refusal, std::min(size_t(n), sizeof h));
  const bool whole = size_t(n) == sizeof h && h.magic == wire::MAGIC && h.verb == uint8_t(wire::Verb::VERBS_READ) && h.kind == uint8_t(wire::Kind::REPLY) && h.status;
  if (!whole || !stream_) return broke_protocol();
  auto stream = std::move(stream_);
  stream->job->lose(*stream, item_, uint32_t(stream->items.size()), h.status);
  broke_protocol();   // either it or this client did not keep to it
}

// --- without RDMA after all ---

void ReadConn::avoid_rdma(const std::string& kind, const std::string& why) {
  node.tcp_until_ns.store(now_ns() + net.config.rdma_retry_ns, std::memory_order_relaxed);
  net.stats.rdma_fallbacks++;
  const char* then = net.config.transport == Transport::RDMA ? "; with transport \"rdma\" it is not read from" : "; reads from it, and others like it, go over TCP";
  net.notice(kind, true, "node " + address_text(node) + ": " + why + then);
}

// This connection goes on over TCP. `here`: it is for this host's sake, not the node's.
void ReadConn::no_rdma(const std::string& kind, const std::string& why, bool here) {
  if (!here) {
    avoid_rdma(kind, why);
  } else {
    net.stats.rdma_fallbacks++;
    net.notice(kind, true, "RDMA: " + why + (net.config.transport == Transport::RDMA ? "" : "; reads go over TCP meanwhile"));
  }
  if (net.config.transport == Transport::RDMA) return close(outcome(Fault::LIMIT));
  let_go();
  if (stream_) ask();
}

// This connection is of no more use; another takes over.
void ReadConn::over_tcp_elsewhere(const std::string& kind, const std::string& why) {
  avoid_rdma(kind, why);
  auto stream = net.config.transport == Transport::RDMA ? nullptr : std::move(stream_);
  close(outcome(stream_ ? Fault::LIMIT : Fault::CANCELLED));
  if (stream && !stream->job->over()) stream->job->launch({stream}, true);
}

void ReadConn::let_go() {
  if (!link_) return;
  rdma_.store(false, std::memory_order_relaxed);
  if (auto landing = std::move(link_->landing)) {
    if (link_->watched) loop.unwatch(landing->endpoint().fd());
    net.stats.rdma_connections--;
    net.worker->run([landing = std::move(landing)] {});   // fences the zone, which may wait
  }
  link_ = nullptr;
}

// --- asking ---

void ReadConn::ask_by_rdma() {
  VerbsLink& v = *link_;
  const LoadJob& job = *stream_->job;
  const auto& items = stream_->items;
  const uint64_t zone = v.landing->zone_bytes();
  const uint32_t may = std::min(last_, job.may_ask(*stream_, asked_));
  while (asked_ < may && v.credits && (v.flights.empty() || zone - (v.head - v.tail) >= zone / 2)) {
    const uint32_t first = asked_;
    v.round = (v.round + 1) & 0xff;
    if (v.flights.empty()) v.head = v.tail = 0;   // so that the longest item fits
    std::vector<VerbsLink::Flight> batch;
    while (asked_ < may && v.credits && batch.size() < wire::READ_EXTENTS_MAX) {
      const uint64_t bytes = job.body_bytes(items[asked_]), room = align_up(bytes, ZONE_ALIGN), at = v.head % zone;
      const uint64_t skip = at + room > zone ? zone - at : 0;
      if (v.head + skip + room - v.tail > zone) break;
      v.head += skip + room;
      batch.push_back({v.head, uint32_t((v.head - room) % zone), uint32_t(bytes), v.round, uint32_t(batch.size())});
      asked_++;
      v.credits--;
    }
    if (batch.empty()) break;   // the ring's end is in the way: with the next item that comes
    v.flights.insert(v.flights.end(), batch.begin(), batch.end());
    if (!send_bytes(job.verbs_frame(*stream_, first, batch, std::exchange(v.untold, 0)))) return;
  }
}

std::vector<uint8_t> LoadJob::verbs_frame(const Stream& stream, uint32_t first, std::span<const VerbsLink::Flight> flights, uint32_t credits) const {
  std::unordered_map<uint64_t, uint16_t> slots;
  std::vector<wire::ReadExtent> extents;
  std::vector<wire::VerbsItem> items;
  for (const auto& flight : flights) {
    const Stream::Item& item = stream.items[first + flight.ordinal];
    auto [slot, fresh] = slots.try_emplace(uint64_t(item.extent) << 8 | item.shard, uint16_t(extents.size()));
    if (fresh) extents.push_back(read_extent(item));
    items.push_back({slot->second, item.plane, 0, flight.bytes, flight.offset});
  }
  wire::VerbsRead head{};
  std::memcpy(head.read.owner, plan_.owner.data(), OWNER_BYTES);
  head.read.epoch = plan_.epoch;
  head.read.extents = uint32_t(extents.size());
  head.read.items = uint32_t(items.size());
  head.credits = credits;
  head.round = flights[0].round;
  const size_t extents_bytes = extents.size() * sizeof(wire::ReadExtent), items_bytes = items.size() * sizeof(wire::VerbsItem);
  std::vector<uint8_t> frame(sizeof(FrameHeader) + sizeof head + extents_bytes + items_bytes);
  uint8_t* body = frame.data() + sizeof(FrameHeader);
  std::memcpy(body, &head, sizeof head);
  std::memcpy(body + sizeof head, extents.data(), extents_bytes);
  std::memcpy(body + sizeof head + extents_bytes, items.data(), items_bytes);
  const size_t bytes = frame.size() - sizeof(FrameHeader);
  const auto header = request_header(wire::Verb::VERBS_READ, shared_->net->next_id(), uint32_t(bytes), wire::body_check(body, bytes));
  std::memcpy(frame.data(), &header, sizeof header);
  return frame;
}

// --- what has come ---

void ReadConn::on_side() {
  if (!link_ || !link_->landing || state() == State::CLOSED) return;
  if (!link_->landing->endpoint().listen()) return close(outcome(Fault::BROKEN));
  take_completions(false);
}

void ReadConn::take_completions(bool all) {
  for (int turn = 0; all || turn < TURNS; turn++) {
    if (state() == State::CLOSED || !link_) return;
    VerbsLink& v = *link_;
    ibv_wc done[COMPLETIONS];
    const int n = v.landing->endpoint().poll(done, COMPLETIONS);
    if (n == 0) return;
    if (n < 0) return close(outcome(Fault::BROKEN));
    uint32_t used = 0;   // receives
    for (int i = 0; i < n; i++) {
      const ibv_wc& wc = done[i];
      if (wc.status != IBV_WC_SUCCESS) {
        net.stats.rdma_faults++;
        if (v.state == LinkState::BINDING) return over_tcp_elsewhere("bind", "its landing zone could not be opened");
        return close(outcome(Fault::BROKEN));
      }
      if (wc.wr_id == verbs::Landing::BIND && v.state == LinkState::BINDING) {
        ready();
        if (state() == State::CLOSED) return;
        continue;
      }
      if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return broke_protocol();
      used++;
      if (!arrived(ntohl(wc.imm_data))) return;
    }
    if (used && !v.landing->endpoint().post_receives(used)) return close(outcome(Fault::BROKEN));
    v.untold += used;
    v.credits += used;
    if (stream_) ask();
  }
  auto self = std::static_pointer_cast<ReadConn>(shared_from_this());
  loop.post([self] { self->take_completions(false); });
}

bool ReadConn::arrived(uint32_t immediate) {
  VerbsLink& v = *link_;
  if (!stream_ || v.flights.empty()) return broke_protocol(), false;
  const VerbsLink::Flight flight = v.flights.front();
  const uint32_t status = immediate >> 24;
  if (immediate != wire::verbs_immediate(status, flight.round, flight.ordinal) || (status && !known(status))) return broke_protocol(), false;
  heard_stream();
  v.proven = true;
  v.flights.pop_front();
  v.tail = flight.end;
  auto stream = stream_;
  if (status) {
    stream->job->lose(*stream, item_, item_ + 1, status);
  } else {
    net.stats.read_bytes_rdma.fetch_add(flight.bytes, std::memory_order_relaxed);
    land(v.landing->zone() + flight.offset);
  }
  next_item();
  return true;
}

// The peer can write to its zone at any time: what is checked is a copy.
void ReadConn::land(const uint8_t* at) {
  begin_body();
  while (body_got_ < body_bytes_ && !discarding_) {
    const size_t n = size_t(std::min<uint64_t>(body_bytes_ - body_got_, STEP_BYTES));
    std::memcpy(buffer(), at + body_got_, n);
    take_body(buffer(), n);
  }
}

}  // namespace kv::client
