// See client_small.hpp.
#include "client_small.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <utility>

namespace kv::client {

using wire::FrameHeader;

// --- Call ---

bool Call::wait(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, 3600 * SECOND));
  return changed_.wait_until(lock, until, [this] { return done_locked(); });
}

uint32_t Call::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

std::vector<uint32_t> Call::owing(int64_t age_ns) const {
  const int64_t before = now_ns() - age_ns;
  std::vector<uint32_t> out;
  std::lock_guard lock(mutex_);
  for (const Slot& s : slots_)
    if (!s.answered && s.sent_ns <= before) out.push_back(s.node);
  return out;
}

uint32_t Call::send(uint32_t node, wire::Verb verb, const std::vector<uint8_t>& body) {
  uint32_t slot;
  {
    std::lock_guard lock(mutex_);
    slot = uint32_t(slots_.size());
    slots_.push_back({node, now_ns()});
    pending_++;
  }
  auto conn = node < net_->nodes.size() ? SmallConn::of(*net_, *net_->nodes[node]) : nullptr;
  if (conn)
    conn->submit(verb, body, shared_from_this(), slot);
  else
    answer(slot, outcome(Fault::UNREACHABLE), {});
  return slot;
}

void Call::answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) {
  std::lock_guard lock(mutex_);
  Slot& s = slots_[slot];
  if (s.answered) return;
  s.answered = true;
  pending_--;
  if (result == 0) learnt_.add(now_ns() - s.sent_ns);
  on_answer(slot, result, body);
  if (done_locked()) changed_.notify_all();
}

// --- SmallConn ---

std::shared_ptr<SmallConn> SmallConn::of(Net& net, Node& node) {
  std::lock_guard lock(node.mutex);
  if (node.small && node.small->state() != State::CLOSED) return node.small;
  if (node.down(now_ns())) return nullptr;
  node.small = std::make_shared<SmallConn>(net, node);
  net.small_loop->post([conn = node.small] { conn->open(); });
  return node.small;
}

void SmallConn::submit(wire::Verb verb, const std::vector<uint8_t>& body, std::shared_ptr<Call> call, uint32_t slot) {
  Outcome failure = 0;
  {
    std::lock_guard lock(mutex_);
    if (state() == State::CLOSED) {
      failure = outcome(Fault::BROKEN);
    } else if (out_.size() - out_at_ + body.size() > OUT_BYTES_MAX || body.size() > wire::SMALL_BODY_MAX) {
      failure = outcome(Fault::LIMIT);
    } else {
      const uint64_t request = net.next_id();
      const FrameHeader header = request_header(verb, request, uint32_t(body.size()), wire::body_check(body.data(), body.size()));
      const auto* h = reinterpret_cast<const uint8_t*>(&header);
      out_.insert(out_.end(), h, h + sizeof header);
      out_.insert(out_.end(), body.begin(), body.end());
      last_used_ns_ = now_ns();
      pending_.emplace(request, Pending{call, slot, last_used_ns_, uint8_t(verb)});
      if (state() == State::OPEN) {
        flush_locked();   // a failure shows in epoll, too
        listen_locked();
      }
    }
  }
  if (failure) call->answer(slot, failure, {});
}

void SmallConn::answer(uint64_t request_id, uint8_t verb, Outcome result, std::span<const uint8_t> body) {
  Pending pending;
  {
    std::lock_guard lock(mutex_);
    auto found = pending_.find(request_id);
    if (found == pending_.end() || found->second.verb != verb) return;   // an answer to nothing: ignored
    pending = std::move(found->second);
    pending_.erase(found);
  }
  pending.call->answer(pending.slot, result, body);
}

void SmallConn::on_read() {
  if (in_.empty()) in_.resize(64 << 10);
  for (;;) {
    const ssize_t n = receive(in_.data() + in_used_, in_.size() - in_used_);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return close(outcome(Fault::BROKEN));
    heard(now_ns());
    in_used_ += size_t(n);
    const bool full = in_used_ == in_.size();
    size_t at = 0;
    while (in_used_ - at >= sizeof(FrameHeader)) {
      FrameHeader h;
      std::memcpy(&h, in_.data() + at, sizeof h);
      if (h.magic != wire::MAGIC || h.version != wire::VERSION || h.kind != uint8_t(wire::Kind::REPLY) || h.body_bytes > wire::SMALL_BODY_MAX)
        return broke_protocol();
      const size_t whole = sizeof h + h.body_bytes;
      if (in_used_ - at < whole) {
        if (in_.size() < whole) {
          in_.erase(in_.begin(), in_.begin() + long(at));
          in_used_ -= at;
          at = 0;
          in_.resize(whole);
        }
        break;
      }
      const uint8_t* body = in_.data() + at + sizeof h;
      if (h.body_check != (h.body_bytes ? wire::body_check(body, h.body_bytes) : h.body_check)) return broke_protocol();
      answer(h.request_id, h.verb, h.status, {body, h.body_bytes});
      at += whole;
    }
    if (at) std::memmove(in_.data(), in_.data() + at, in_used_ -= at);
    if (!full) return;
  }
}

void SmallConn::on_closed(Outcome why) {
  std::unordered_map<uint64_t, Pending> orphans;
  {
    std::lock_guard lock(mutex_);
    orphans.swap(pending_);
  }
  for (auto& [request, pending] : orphans) pending.call->answer(pending.slot, why, {});
  std::lock_guard lock(node.mutex);
  if (node.small.get() == this) node.small = nullptr;
}

bool SmallConn::on_sweep(int64_t now) {
  if (Conn::on_sweep(now) || state() == State::CLOSED) return true;
  int64_t oldest = INT64_MAX, used;
  {
    std::lock_guard lock(mutex_);
    for (auto& [request, pending] : pending_) oldest = std::min(oldest, pending.sent_ns);
    used = last_used_ns_;
  }
  if (oldest == INT64_MAX) {
    if (greeted_ && now - std::max(used, last_heard_ns_) > net.config.idle_timeout_ns) close(outcome(Fault::CANCELLED));
    return false;
  }
  if (now - std::max(oldest, last_heard_ns_) > net.config.stall_timeout_ns) close(outcome(Fault::STALLED));
  return true;
}

// --- RpcCall ---

void RpcCall::on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) {
  if (answers_.size() <= slot) answers_.resize(slot + 1);
  answers_[slot] = {result, true, {body.begin(), body.end()}};
  good_ += result == 0;
}

std::vector<RpcCall::Answer> RpcCall::answers() const {
  std::lock_guard lock(mutex_);
  auto out = answers_;
  out.resize(slots_.size());
  return out;
}

// --- DiscoverCall ---

DiscoverCall::DiscoverCall(std::shared_ptr<Net> net, const Owner& owner, uint64_t epoch, const uint8_t* keys, uint32_t count, const Readable& readable)
    : Call(net, net->discover_delay),
      owner_(owner),
      epoch_(epoch),
      readable_(readable),
      keys_(keys, keys + size_t(count) * KEY_BYTES),
      answers_(count),
      wanted_(count) {
  tags_.reserve(count);
  for (uint32_t i = 0; i < count; i++) tags_.push_back(block_tag(keys + size_t(i) * KEY_BYTES));
}

void DiscoverCall::ask(const int32_t* indices, const int32_t* nodes, uint32_t count, bool counted) {
  std::vector<std::pair<int32_t, std::vector<int32_t>>> batches;
  std::unordered_map<int32_t, size_t> open;   // node: its batch that is not full
  for (uint32_t i = 0; i < count; i++) {
    if (indices[i] < 0 || size_t(indices[i]) >= answers_.size()) continue;
    auto [at, fresh] = open.try_emplace(nodes[i], batches.size());
    if (fresh) batches.push_back({nodes[i], {}});
    auto& batch = batches[at->second].second;
    batch.push_back(indices[i]);
    if (batch.size() == KEYS_PER_FRAME) open.erase(at);
  }
  if (counted) {
    std::lock_guard lock(mutex_);
    for (auto& [node, batch] : batches)
      for (const int32_t key : batch) unsettled_ += wanted_[size_t(key)]++ == answers_[size_t(key)];
  }
  std::vector<uint8_t> body;
  for (auto& [node, batch] : batches) {
    wire::DiscoverRequest head{};
    std::memcpy(head.owner, owner_.data(), OWNER_BYTES);
    head.epoch = epoch_;
    head.count = uint32_t(batch.size());
    body.resize(sizeof head + batch.size() * KEY_BYTES);
    std::memcpy(body.data(), &head, sizeof head);
    for (size_t i = 0; i < batch.size(); i++)
      std::memcpy(body.data() + sizeof head + i * KEY_BYTES, keys_.data() + size_t(batch[i]) * KEY_BYTES, KEY_BYTES);
    {
      std::lock_guard lock(mutex_);
      asked_.push_back(std::move(batch));   // one slot follows another: only this thread asks
    }
    send(uint32_t(node), wire::Verb::DISCOVER, body);
  }
}

void DiscoverCall::on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) {
  const auto& asked = asked_[slot];
  if (result != 0 || !parse(asked, body)) failed_.insert(failed_.end(), asked.begin(), asked.end());
}

bool DiscoverCall::parse(const std::vector<int32_t>& asked, std::span<const uint8_t> body) {
  wire::DiscoverReply reply;
  if (body.size() < sizeof reply) return false;
  std::memcpy(&reply, body.data(), sizeof reply);
  size_t at = sizeof reply;
  std::vector<bool> yes(asked.size());
  for (uint32_t i = 0; i < reply.writings; i++) {
    wire::Writing w;
    if (body.size() - at < sizeof w) return false;
    std::memcpy(&w, body.data() + at, sizeof w);
    at += sizeof w;
    const size_t earlier_bytes = align_up(4ull * w.earlier_count, 8), tag_bytes = 8ull * w.block_count;
    if (w.key_ordinal >= asked.size() || w.block_count == 0 || w.block_count > BLOCKS_PER_EXTENT_MAX || w.earlier_count > EARLIER_MAX ||
        body.size() - at < earlier_bytes + tag_bytes)
      return false;
    const uint32_t start = uint32_t(asked[w.key_ordinal]);
    yes[w.key_ordinal] = true;
    const uint8_t* earlier = body.data() + at;
    const uint8_t* tags = earlier + earlier_bytes;
    at += earlier_bytes + tag_bytes;
    uint32_t match = 0;
    while (match < w.block_count && start + match < tags_.size() && std::memcmp(tags + 8ull * match, &tags_[start + match], 8) == 0) match++;
    if (match == 0 || !reads(w) || w.start_block != start) continue;
    if (!seen_.insert(w.write_id ^ (uint64_t(start) * 0x9E3779B97F4A7C15ull)).second) continue;
    for (uint32_t e = 0; e < w.earlier_count; e++) {
      uint32_t value;
      std::memcpy(&value, earlier + 4ull * e, 4);
      if (value < start) earlier_.push_back(value);
    }
    found_.push_back({w.write_id, w.write_epoch, start, match, w.depth, w.fidelity, {}});
  }
  for (size_t i = 0; i < asked.size(); i++) {
    if (reply.busy && !yes[i])
      failed_.push_back(asked[i]);
    else if (answers_[asked[i]] < 255)
      unsettled_ -= ++answers_[asked[i]] == wanted_[asked[i]];
  }
  return true;
}

bool DiscoverCall::reads(const wire::Writing& w) const {
  const Readable& r = readable_;
  return w.layout_tag == r.layout_tag && w.block_bytes == r.block_bytes && w.kv_group == r.kv_group && w.plane_count == r.plane_count &&
         w.k == r.k && w.m == r.m && w.cipher == 0;
}

std::vector<Found> DiscoverCall::found() const {
  std::lock_guard lock(mutex_);
  return found_;
}

std::vector<uint32_t> DiscoverCall::earlier() const {
  std::lock_guard lock(mutex_);
  return earlier_;
}

std::vector<uint32_t> DiscoverCall::starts() const {
  std::lock_guard lock(mutex_);
  std::vector<uint32_t> out = earlier_;
  for (const Found& f : found_) out.push_back(f.start);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

DiscoverCall::Walk DiscoverCall::walk(uint32_t rows, std::span<const uint64_t> epochs, std::span<const uint32_t> refused) const {
  std::vector<Candidate> candidates;
  Walk out;
  {
    std::lock_guard lock(mutex_);
    std::vector<bool> out_of_question(rows);
    for (const uint32_t row : refused) out_of_question.at(row) = true;
    for (uint32_t row = 0; row < std::min(rows, uint32_t(found_.size())); row++) {
      const Found& f = found_[row];
      if (out_of_question[row] || std::ranges::find(epochs, f.write_epoch) == epochs.end()) continue;
      candidates.push_back({f.start, f.start + f.match, row});
      out.starts.push_back(f.start);
    }
  }
  out.pieces = cover(std::move(candidates));
  return out;
}

wire::WritingName DiscoverCall::name_of(const Found& found) const {
  wire::WritingName name;
  std::memcpy(name.extent_key, keys_.data() + size_t(found.start) * KEY_BYTES, KEY_BYTES);
  name.write_id = found.write_id;
  return name;
}

std::vector<wire::WritingName> DiscoverCall::names(std::span<const uint32_t> rows) const {
  std::lock_guard lock(mutex_);
  std::vector<wire::WritingName> out;
  for (const uint32_t row : rows) out.push_back(name_of(found_.at(row)));
  return out;
}

std::vector<TicketExtent> DiscoverCall::extents(std::span<const Piece> pieces, std::span<const uint64_t> absent) const {
  std::lock_guard lock(mutex_);
  std::vector<TicketExtent> out;
  for (size_t i = 0; i < pieces.size(); i++) {
    const Piece& p = pieces[i];
    const Found& f = found_.at(p.row);
    out.push_back({name_of(f), f.write_epoch, absent[i], p.start - f.start, p.end - p.start, f.depth, f.fidelity, {}});
  }
  return out;
}

std::vector<uint8_t> DiscoverCall::answers() const {
  std::lock_guard lock(mutex_);
  return answers_;
}

std::vector<int32_t> DiscoverCall::take_failed() {
  std::lock_guard lock(mutex_);
  return std::exchange(failed_, {});
}

std::vector<int32_t> DiscoverCall::unsettled() const {
  std::lock_guard lock(mutex_);
  std::vector<int32_t> out;
  for (size_t i = 0; i < answers_.size(); i++)
    if (answers_[i] < wanted_[i]) out.push_back(int32_t(i));
  return out;
}

// --- PromiseCall ---

PromiseCall::PromiseCall(std::shared_ptr<Net> net, const Want& want)
    : Call(net, net->promise_delay),
      head_(want.head),
      count_(want.count),
      shards_(want.shards),
      need_(want.need),
      names_(want.names, want.names + size_t(want.count) * sizeof(wire::WritingName)),
      nodes_(want.nodes, want.nodes + size_t(want.count) * want.shards),
      masks_(want.count),
      answered_(want.count),
      last_buckets_(want.count),
      short_(want.need ? want.count : 0) {}

void PromiseCall::start() {
  std::unordered_map<int32_t, std::vector<uint32_t>> by_node;
  std::vector<int32_t> order;
  for (uint32_t e = 0; e < count_; e++) {
    for (uint32_t s = 0; s < shards_; s++) {
      const int32_t node = nodes_[size_t(e) * shards_ + s];
      if (node < 0) {
        answered_[e] |= uint64_t(1) << s;
        continue;
      }
      auto [at, fresh] = by_node.try_emplace(node);
      if (fresh) order.push_back(node);
      if (at->second.empty() || at->second.back() != e) at->second.push_back(e);   // a node with several shards is asked once
    }
  }
  constexpr size_t PER_FRAME = 4096;
  std::vector<uint8_t> body;
  for (int32_t node : order) {
    const auto& all = by_node[node];
    for (size_t first = 0; first < all.size(); first += PER_FRAME) {
      const size_t n = std::min(PER_FRAME, all.size() - first);
      wire::PromiseRequest head = head_;
      head.count = uint32_t(n);
      body.resize(sizeof head + n * sizeof(wire::WritingName));
      std::memcpy(body.data(), &head, sizeof head);
      for (size_t i = 0; i < n; i++)
        std::memcpy(body.data() + sizeof head + i * sizeof(wire::WritingName), names_.data() + size_t(all[first + i]) * sizeof(wire::WritingName),
                    sizeof(wire::WritingName));
      {
        std::lock_guard lock(mutex_);
        asked_.emplace_back(all.begin() + long(first), all.begin() + long(first + n));
      }
      send(uint32_t(node), wire::Verb::PROMISE, body);
    }
  }
}

void PromiseCall::on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) {
  const auto& asked = asked_[slot];
  const int32_t node = int32_t(slots_[slot].node);
  const bool good = result == 0 && body.size() == asked.size() * sizeof(wire::PromiseAnswer);
  for (size_t i = 0; i < asked.size(); i++) {
    const uint32_t e = asked[i];
    uint64_t theirs = 0;   // a node speaks for its own places in the list only
    for (uint32_t s = 0; s < shards_; s++)
      if (nodes_[size_t(e) * shards_ + s] == node) theirs |= uint64_t(1) << s;
    answered_[e] |= theirs;
    if (!good) continue;
    wire::PromiseAnswer a;
    std::memcpy(&a, body.data() + i * sizeof a, sizeof a);
    if (a.status != uint32_t(Status::OK)) continue;
    last_buckets_[e] = std::max(last_buckets_[e], a.last_bucket);
    const bool was_short = uint32_t(std::popcount(masks_[e])) < need_;
    masks_[e] |= a.shard_mask & theirs;
    if (was_short && uint32_t(std::popcount(masks_[e])) >= need_) short_--;
  }
}

std::vector<uint64_t> PromiseCall::masks() const {
  std::lock_guard lock(mutex_);
  return masks_;
}

std::vector<uint32_t> PromiseCall::last_buckets() const {
  std::lock_guard lock(mutex_);
  return last_buckets_;
}

std::vector<uint64_t> PromiseCall::answered() const {
  std::lock_guard lock(mutex_);
  return answered_;
}

}  // namespace kv::client
