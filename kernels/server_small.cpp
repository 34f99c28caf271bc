// DISCOVER, PROMISE, WITHDRAW, WHY, ADMIT, SUSPECT.
#include "server_small.hpp"

#include <algorithm>

#include "server_bulk.hpp"

namespace kv {
namespace {
constexpr uint32_t DISCOVER_KEYS = 256;        // per Store::discover: at most 2.4 MB of writings in memory at once
}  // namespace

SmallLoop::SmallLoop(ServerShared& shared, int listener, std::vector<BulkLoop*> bulk)
    : FrontLoop(shared, listener), shared_(shared), bulk_(std::move(bulk)) {}

void SmallLoop::on_tick(int64_t now) {
  FrontLoop::on_tick(now);
  shared_.arena.trim();
}

void SmallLoop::on_greeting(wire::Hello& mine) {
  mine.bucket_seconds = shared_.config.bucket_seconds;
  mine.bucket = shared_.store.bucket_now();
}

void SmallLoop::give_away(Conn& conn) {
  conn.bulk = std::make_unique<BulkState>();
  Message message;
  message.kind = Message::Kind::ADOPT;
  message.adopted = release(conn);
  bulk_[next_bulk_++ % bulk_.size()]->post(std::move(message));
}

Status SmallLoop::answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  switch (wire::Verb(header.verb)) {
    case wire::Verb::DISCOVER: return discover(conn, header, body);
    case wire::Verb::PROMISE: return promise(conn, header, body);
    case wire::Verb::WHY: return why(conn, header, body);
    case wire::Verb::ADMIT: return admit(conn, header, body);
    case wire::Verb::SUSPECT: return suspect(conn, header, body);
    default: return withdraw(conn, header, body);
  }
}

namespace {
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

Status SmallLoop::suspect(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) {
  wire::SuspectRequest request;
  if (const Status why = take_request(header, body, wire::SUSPECTS_MAX, sizeof(wire::SuspectShard), request); why != Status::OK) return why;
  if (request.zero) return Status::BAD_REQUEST;
  shards_.resize(request.count);   // a copy, for its alignment
  std::memcpy(shards_.data(), body + sizeof request, shards_.size() * sizeof(wire::SuspectShard));
  for (const wire::SuspectShard& each : shards_)
    if (std::any_of(std::begin(each.zero), std::end(each.zero), [](uint8_t byte) { return byte != 0; })) return Status::BAD_REQUEST;
  result_.assign(shards_.size() * sizeof(uint32_t), 0);
  shared_.store.suspect(owner_of(request), shards_.data(), request.count, reinterpret_cast<uint32_t*>(result_.data()));
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
