// LoadJob: its streams, places, hedging and end. Decoding is in client_decode.cpp. See client_load.hpp.
#include "client_load.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <map>
#include <utility>

namespace kv::client {

namespace {
std::atomic<uint32_t> home_{0};
constexpr int64_t TICK_NS = 1 * MS;
constexpr int64_t LATE_TRUSTED_NS = 5 * SECOND;   // a node called late longer ago is given another try
}  // namespace

// --- start ---

LoadJob::LoadJob(std::shared_ptr<LoadShared> shared, LoadPlan plan)
    : shared_(std::move(shared)),
      plan_(std::move(plan)),
      k_(shared_->codec.k()),
      m_(shared_->codec.m()),
      plane_count_(uint32_t(plan_.planes.size())),
      stream_(plan_.extents.size(), std::vector<int32_t>(k_ + m_, -1)),
      done_(plan_.extents.size() * plane_count_),
      plane_done_(plane_count_),
      cut_(uint32_t(plan_.extents.size())) {
  for (const ExtentPlan& x : plan_.extents) {
    auto w = std::make_unique<ExtentWork>();
    w->planes.resize(plane_count_);
    w->checks.reset(new uint8_t[24ull * x.count * plane_count_ * (k_ + m_)]);
    w->leases.resize(plane_count_ * (k_ + m_));
    for (uint32_t i = 0; i < m_; i++) w->parity_order[i] = uint8_t(k_ + (x.name.extent_key[KEY_BYTES - 1] + i) % m_);   // rotates by key
    work_.push_back(std::move(w));
  }
}

LoadJob::~LoadJob() {
  for (uint32_t e = 0; e < work_.size(); e++)
    for (uint32_t p = 0; p < plane_count_; p++) free_parity(work_[e]->planes[p], e, p);
}

void LoadJob::start() {
  const int64_t now = now_ns();
  Net& net = *shared_->net;
  auto& nodes = net.nodes;
  std::vector<std::shared_ptr<Stream>> streams;
  std::map<uint32_t, int32_t> by_node;   // index of its stream
  auto stream_of = [&](uint32_t node) -> int32_t {
    auto [at, fresh] = by_node.try_emplace(node, int32_t(streams.size()));
    if (fresh) {
      streams.push_back(std::make_shared<Stream>());
      streams.back()->job = shared_from_this();
      streams.back()->node = node;
    }
    return at->second;
  };
  const uint32_t extents = uint32_t(plan_.extents.size());
  std::vector<std::vector<uint8_t>> asked(extents);   // shards, data first
  for (uint32_t e = 0; e < extents; e++) {
    const ExtentPlan& x = plan_.extents[e];
    ExtentWork& w = *work_[e];
    uint64_t lost = 0, late = 0;
    for (uint32_t s = 0; s < k_ + m_; s++) {
      const int32_t n = x.nodes[s];
      if (n < 0 || size_t(n) >= nodes.size() || nodes[size_t(n)]->down(now))
        lost |= bit(s);
      else if (int64_t since = nodes[size_t(n)]->late_since_ns.load(std::memory_order_relaxed); since && now - since < LATE_TRUSTED_NS)
        late |= bit(s);
    }
    w.spared = x.doubtful & ~lost;
    each(late, [&](uint32_t s) {   // who still owes an answer is not asked for another while others can stand in
      if (uint32_t(std::popcount(lost | w.spared)) < m_) w.spared |= bit(s);
    });
    for (auto& plane : w.planes) plane.lost = lost;
    const uint64_t passed = lost | w.spared;
    for (uint32_t s = 0; s < k_; s++)
      if (!(passed & bit(s))) {
        asked[e].push_back(uint8_t(s));
      }
    uint32_t want = uint32_t(std::popcount(passed & data_mask()));
    if (plan_.eager && !want) want = 1;
    for (uint32_t i = 0; i < m_ && want; i++) {
      const uint32_t s = w.parity_order[i];
      if (passed & bit(s)) continue;
      want--;
      asked[e].push_back(uint8_t(s));
      stats.parity_asked++;
    }
    for (uint8_t s : asked[e]) {
      w.asked |= bit(s);
      stream_[e][s] = stream_of(uint32_t(x.nodes[s]));
    }
    stats.shards_asked += asked[e].size();
    stats.missing_shards += uint32_t(std::popcount(lost));
  }
  in_order(extents, [&](uint32_t e, uint32_t p) {
    for (uint8_t s : asked[e]) streams[size_t(stream_[e][s])]->items.push_back({e, uint8_t(p), s});
  });
  {
    std::lock_guard lock(mutex_);
    streams_ = streams;
    conns_.resize(streams.size());
    if (plan_.by_plane && extents) {
      uint64_t bytes = 0;
      in_order(extents, [&](uint32_t e, uint32_t p) { ends_.push_back(bytes += k_ * body_bytes({e, uint8_t(p), 0})); });
      granted_ = 0;
      grant_more();
    }
  }
  launch(streams);
  Todo todo;
  for (uint32_t e = 0; e < extents; e++) {
    std::lock_guard lock(work_[e]->mutex);
    for (uint32_t p = 0; p < plane_count_; p++)
      if (work_[e]->planes[p].lost | work_[e]->spared) judge(e, p, todo);
  }
  run(todo);
  Loop& home = net.bulk_loop(home_++);   // loads take turns
  home.post([&home, self = shared_from_this()] { self->arm_tick(home); });
}

// Items in order; a new READ where one would name too many extents or items.
std::vector<uint8_t> LoadJob::read_frames(Stream& stream, uint32_t first, uint32_t last) const {
  std::vector<uint8_t> frames;
  std::unordered_map<uint64_t, uint16_t> slots;
  std::vector<wire::ReadExtent> extents;
  std::vector<wire::ReadItem> items;
  auto close = [&] {
    wire::ReadRequest head{};
    std::memcpy(head.owner, plan_.owner.data(), OWNER_BYTES);
    head.epoch = plan_.epoch;
    head.extents = uint32_t(extents.size());
    head.items = uint32_t(items.size());
    const size_t bytes = sizeof head + extents.size() * sizeof(wire::ReadExtent) + items.size() * sizeof(wire::ReadItem);
    const size_t at = frames.size();
    frames.resize(at + sizeof(wire::FrameHeader) + bytes);
    uint8_t* body = frames.data() + at + sizeof(wire::FrameHeader);
    std::memcpy(body, &head, sizeof head);
    std::memcpy(body + sizeof head, extents.data(), extents.size() * sizeof(wire::ReadExtent));
    std::memcpy(body + sizeof head + extents.size() * sizeof(wire::ReadExtent), items.data(), items.size() * sizeof(wire::ReadItem));
    const auto header = request_header(wire::Verb::READ, stream.requests.back().id, uint32_t(bytes), wire::body_check(body, bytes));
    std::memcpy(frames.data() + at, &header, sizeof header);
    slots.clear();
    extents.clear();
    items.clear();
  };
  for (uint32_t i = first; i < last; i++) {
    const auto& item = stream.items[i];
    const uint64_t name = uint64_t(item.extent) << 8 | item.shard;
    if (extents.size() == wire::READ_EXTENTS_MAX || items.size() == wire::READ_ITEMS_MAX) close();
    if (items.empty()) stream.requests.push_back({shared_->net->next_id(), i});
    auto [slot, fresh] = slots.try_emplace(name, uint16_t(extents.size()));
    if (fresh) extents.push_back(read_extent(item));
    items.push_back({slot->second, item.plane, 0});
  }
  if (!items.empty()) close();
  return frames;
}

wire::ReadExtent LoadJob::read_extent(const Stream::Item& item) const {
  const ExtentPlan& x = plan_.extents[item.extent];
  wire::ReadExtent r{};
  std::memcpy(r.extent_key, x.name.extent_key, KEY_BYTES);
  r.write_id = x.name.write_id;
  r.shard = item.shard;
  r.first_block = uint16_t(x.first_block);
  r.block_count = uint16_t(x.count);
  return r;
}

void LoadJob::launch(const std::vector<std::shared_ptr<Stream>>& streams, bool fresh) {
  using Going = std::pair<std::shared_ptr<ReadConn>, std::shared_ptr<Stream>>;
  std::unordered_map<Loop*, std::vector<Going>> by_loop;   // woken once each
  for (const auto& stream : streams) {
    uint64_t longest = 0;
    for (const auto& item : stream->items) longest = std::max(longest, body_bytes(item));
    auto conn = ReadConn::lease(*shared_->net, *shared_->net->nodes[stream->node], fresh, longest);
    if (!conn) {
      lose(*stream, 0, uint32_t(stream->items.size()), outcome(Fault::UNREACHABLE));
      continue;
    }
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < streams_.size(); i++)
        if (streams_[i] == stream) conns_[i] = conn;
    }
    by_loop[&conn->loop].emplace_back(std::move(conn), stream);
  }
  for (auto& [loop, going] : by_loop)
    loop->post([going = std::move(going)] {
      for (auto& [conn, stream] : going) conn->start(stream);
    });
}

// --- places ---

uint64_t LoadJob::body_bytes(const Stream::Item& item) const { return uint64_t(24 + piece_bytes(item)) * blocks(item); }

uint8_t* LoadJob::place(uint32_t e, uint32_t p) const {
  return plan_.base + size_t(plan_.extents[e].row) * plan_.row_stride + plan_.planes[p].offset;
}

uint8_t* LoadJob::checks(uint32_t e, uint32_t p, uint32_t s) const {
  return work_[e]->checks.get() + 24ull * plan_.extents[e].count * (size_t(p) * (k_ + m_) + s);
}

uint64_t LoadJob::seed(uint32_t e, uint32_t p, uint32_t s, uint32_t block) const {
  const ExtentPlan& x = plan_.extents[e];
  ShardIdentity id{};
  std::memcpy(id.owner, plan_.owner.data(), OWNER_BYTES);
  std::memcpy(id.extent_key, x.name.extent_key, KEY_BYTES);
  id.write_id = x.name.write_id;
  id.shard = s;
  id.plane = p;
  id.block = x.first_block + block;
  return shard_seed(id);
}

bool LoadJob::claim(const Stream::Item& item, uint64_t lease, bool from_start, Target& to) {
  const PlaneSpec& plane = plan_.planes[item.plane];
  ExtentWork& w = *work_[item.extent];
  std::lock_guard lock(w.mutex);
  PlaneWork& work = w.planes[item.plane];
  if (over() || work.complete || ((work.revoked | work.lost | work.good | work.receiving) & bit(item.shard)) || item.extent >= cut_.load()) return false;
  uint64_t& begun_by = w.leases[item.plane * (k_ + m_) + item.shard];
  if (from_start) begun_by = lease;
  else if (begun_by != lease) return false;   // sums of one stream would meet pieces of another
  to = {checks(item.extent, item.plane, item.shard), nullptr, plane.shard_bytes, plane.shard_bytes};
  if (item.shard >= k_) {
    uint8_t*& parity = work.parity[item.shard - k_];
    if (!parity) parity = shared_->scratch.take(size_t(plane.shard_bytes) * blocks(item));
    to.base = parity;
  } else {
    to.base = place(item.extent, item.plane) + size_t(item.shard) * plane.shard_bytes;
    to.stride = plan_.row_stride;
    to.real = shard_real_bytes(plane.bytes, plane.shard_bytes, item.shard);
  }
  work.receiving |= bit(item.shard);
  if (!work.begun_ns) work.begun_ns = now_ns();
  inside_++;
  return true;
}

void LoadJob::release(const Stream::Item& item, Got got) {
  Todo todo;
  {
    std::unique_lock lock(work_[item.extent]->mutex);
    PlaneWork& work = work_[item.extent]->planes[item.plane];
    const uint64_t mine = bit(item.shard);
    work.receiving &= ~mine;
    if (got == Got::WHOLE) work.good |= mine;
    if (got == Got::WHOLE && item.shard >= k_) stats.parity_received++;
    if (got == Got::BAD) {
      work.lost |= mine;
      found_bad(item.extent, mine);
    }
    const bool wanted = work.revoke_wanted & mine;
    work.revoke_wanted &= ~mine;
    if (wanted && got == Got::PART) work.revoked |= mine;
    if (got != Got::PART || wanted) progress(lock, item.extent, item.plane, todo);
    if (work.complete || over()) free_parity(work, item.extent, item.plane);
  }
  leave();
  run(todo);
}

void LoadJob::leave() {
  if (--inside_ == 0 && over()) {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

void LoadJob::lose(Stream& stream, uint32_t first, uint32_t end, Outcome why) {
  Todo todo;
  for (uint32_t i = first; i < end; i++) {
    const auto& item = stream.items[i];
    std::unique_lock lock(work_[item.extent]->mutex);
    PlaneWork& work = work_[item.extent]->planes[item.plane];
    const uint64_t mine = bit(item.shard);
    if (over() || work.complete || ((work.good | work.lost) & mine)) continue;
    work.lost |= mine;
    if (why == outcome(Status::NOT_FOUND))
      stats.missing_shards++;
    else if (why == outcome(Status::CORRUPT))
      stats.bad_shards++;
    else
      stats.failed_shards++;
    progress(lock, item.extent, item.plane, todo);
  }
  run(todo);
  settle(stream, end);
}

void LoadJob::free_parity(PlaneWork& work, uint32_t e, uint32_t p) {
  for (uint32_t j = 0; j < m_; j++)
    if (work.parity[j] && !(work.receiving & bit(k_ + j)) && !work.decoding) {
      shared_->scratch.give(work.parity[j], size_t(plan_.planes[p].shard_bytes) * plan_.extents[e].count);
      work.parity[j] = nullptr;
    }
}

// --- what else to read ---

// Called with the extent's lock after something was lost, called late or doubted: turns to parity, or gives the extent up.
void LoadJob::judge(uint32_t e, uint32_t p, Todo& todo) {
  ExtentWork& w = *work_[e];
  PlaneWork& work = w.planes[p];
  if (work.complete || w.failed || e >= cut_.load()) return;
  const uint32_t lost = uint32_t(std::popcount(work.lost));
  const uint64_t everyone = (uint64_t(1) << (k_ + m_)) - 1;
  const bool hopeless = lost > m_ || (work.doubted && !(everyone & ~(work.good | work.lost)));
  if (hopeless) {
    w.failed = true;
    stats.extents_failed++;
    todo.failed.push_back(e);
    return;
  }
  uint32_t want = uint32_t(std::popcount(data_mask() & ~work.good & (work.lost | work.lagging | w.spared))) + (work.doubted ? m_ : 0);
  auto turn_to = [&](uint32_t s) {
    if (!(work.lagging & ~work.good & bit(s))) want--;   // one that lags itself is no help
    if ((work.good | work.turned_to) & bit(s)) return;
    work.turned_to |= bit(s);
    work.turned_ns = now_ns();
    if (w.asked & bit(s)) return;
    if (uint32_t(std::popcount(w.asked)) <= k_) {
      stats.shards_asked++;
      if (s >= k_) stats.parity_asked++;
    } else {
      stats.late_asked++;
      if (work.lost) stats.late_asked_errors++;
    }
    w.asked |= bit(s);
    todo.late.push_back({e, s});
  };
  for (uint32_t i = 0; i < m_ && want; i++)
    if (!((work.lost | w.spared) & bit(w.parity_order[i]))) turn_to(w.parity_order[i]);
  // The last resort: nodes that owe other answers, or did not have the shard at lookup.
  each(w.spared & ~work.lost & ~(work.good & data_mask()), [&](uint32_t s) {
    if (want) turn_to(s);
  });
}

void LoadJob::run(Todo& todo) {
  if (!todo.late.empty()) ask_late(std::move(todo.late));
  for (uint32_t e : todo.failed) cut_at(e);
}

// A fresh request for shards that were left out: one stream per node.
void LoadJob::ask_late(std::vector<Late> late) {
  std::map<int32_t, std::vector<Late>> by_node;
  for (const Late& l : late) by_node[plan_.extents[l.extent].nodes[l.shard]].push_back(l);
  for (auto& [node, list] : by_node) {
    auto stream = std::make_shared<Stream>();
    stream->job = shared_from_this();
    stream->node = uint32_t(node);
    in_order(uint32_t(list.size()), [&](uint32_t i, uint32_t p) {
      const Late& l = list[i];
      std::lock_guard lock(work_[l.extent]->mutex);
      if (!work_[l.extent]->planes[p].complete) stream->items.push_back({l.extent, uint8_t(p), uint8_t(l.shard)});
    });
    if (stream->items.empty()) continue;
    {
      std::lock_guard lock(mutex_);
      if (ended_) return;
      streams_.push_back(stream);
      conns_.push_back(nullptr);
    }
    launch({stream});
  }
}

void LoadJob::cut_at(uint32_t e) {
  std::lock_guard lock(mutex_);
  if (e >= cut_.load()) return;
  cut_.store(e);
  for (uint32_t p = 0; p < plane_count_; p++) {
    plane_done_[p] = 0;
    for (uint32_t i = 0; i < e; i++) plane_done_[p] += done_[size_t(i) * plane_count_ + p];
  }
  grant_at_ = UINT64_MAX;
  if (granted_.load() < ends_.size()) grant(uint32_t(ends_.size()));
  changed_.notify_all();
}

void LoadJob::arm_tick(Loop& loop) {
  loop.at(now_ns() + TICK_NS, [&loop, self = weak_from_this()] {
    auto job = self.lock();
    if (!job || job->over()) return;
    job->tick();
    job->arm_tick(loop);
  });
}

// Finds shards that lag behind the others of their extent, and turns to parity for them.
void LoadJob::tick() {
  const int64_t now = now_ns(), delay = shared_->delay.delay();
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;   // meanwhile: its streams go with it
    streams = streams_;
  }
  Todo todo;
  const uint32_t cut = cut_.load();
  for (uint32_t e = 0; e < cut; e++) {
    ExtentWork& w = *work_[e];
    std::lock_guard lock(w.mutex);
    for (uint32_t p = 0; p < plane_count_; p++) {
      PlaneWork& work = w.planes[p];
      if (work.complete || work.decoding || work.ready_ns == 0) continue;
      uint64_t fresh = 0;
      each(data_mask() & ~(work.good | work.lost | work.lagging | w.spared), [&](uint32_t s) {
        const Stream& stream = *streams[size_t(stream_[e][s])];
        const int64_t quiet = now - stream.last_ns.load(std::memory_order_relaxed);
        if (now - work.ready_ns > delay || quiet > 2 * delay) fresh |= bit(s);
        if (fresh & bit(s) && quiet > delay) shared_->net->nodes[stream.node]->mark_late(now);
      });
      if (!fresh && now - work.turned_ns > delay) fresh = work.turned_to & ~(work.good | work.lost | work.lagging);   // what it turned to lags, too
      if (!fresh) continue;
      work.lagging |= fresh;
      stats.lagging_shards += uint32_t(std::popcount(fresh));
      judge(e, p, todo);
    }
  }
  run(todo);
  grant_if_still(now);
}

// --- waiting and the end ---

bool LoadJob::wait_plane(uint32_t plane, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, 3600 * SECOND));
  return changed_.wait_until(lock, until, [&] { return ended_ || cancelled_ || plane_done_[plane] >= cut_.load(); });
}

bool LoadJob::wait_all(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, 3600 * SECOND));
  return changed_.wait_until(lock, until, [&] {
    if (ended_ || cancelled_) return true;
    const uint32_t cut = cut_.load();
    return std::all_of(plane_done_.begin(), plane_done_.end(), [cut](uint32_t done) { return done >= cut; });
  });
}

uint32_t LoadJob::rows_of_plane(uint32_t plane) const {
  std::lock_guard lock(mutex_);
  for (uint32_t e = 0; e < plan_.extents.size(); e++)
    if (!done_[size_t(e) * plane_count_ + plane]) return plan_.extents[e].row;
  return plan_.rows;
}

uint32_t LoadJob::rows() const {
  uint32_t least = plan_.rows;
  for (uint32_t p = 0; p < plane_count_; p++) least = std::min(least, rows_of_plane(p));
  return least;
}

std::vector<std::array<int64_t, 4>> LoadJob::times() const {
  std::vector<std::array<int64_t, 4>> out;
  for (const auto& w : work_) {
    std::lock_guard lock(w->mutex);
    for (const PlaneWork& p : w->planes) out.push_back({p.begun_ns, p.complete_ns, p.decode_begun_ns, p.decode_ended_ns});
  }
  return out;
}

void LoadJob::cancel() {
  std::lock_guard lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

void LoadJob::end() {
  {
    std::unique_lock lock(mutex_);
    const bool first = !ended_;
    ended_ = true;
    changed_.notify_all();
    if (!first) {
      changed_.wait(lock, [this] { return over() && inside_.load() == 0; });
      return;
    }
  }
  over_.store(true);
  for (auto& w : work_) {   // whoever claims a place after this sees that the load is over
    std::lock_guard lock(w->mutex);
    for (auto& work : w->planes) work.revoked |= data_mask() & ~(work.good | work.receiving);
  }
  std::vector<std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<ReadConn>> conns;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return inside_.load() == 0; });
    streams.swap(streams_);
    conns.swap(conns_);
    changed_.notify_all();
  }
  for (uint32_t e = 0; e < work_.size(); e++) {
    std::lock_guard lock(work_[e]->mutex);
    for (uint32_t p = 0; p < plane_count_; p++) free_parity(work_[e]->planes[p], e, p);
  }
  for (auto& stream : streams) stream->drain = true;
  for (auto& conn : conns)
    if (conn) conn->loop.post([conn] { conn->drain(); });
  LoadStats& t = shared_->totals;
  t.shards_asked += stats.shards_asked;
  t.late_asked += stats.late_asked;
  t.decodes += stats.decodes;
  t.bad_shards += stats.bad_shards;
  t.missing_shards += stats.missing_shards;
  t.failed_shards += stats.failed_shards;
  t.lagging_shards += stats.lagging_shards;
  t.extents_failed += stats.extents_failed;
  t.digest_mismatches += stats.digest_mismatches;
  t.parity_received += stats.parity_received;
  t.parity_asked += stats.parity_asked;
  t.late_asked_errors += stats.late_asked_errors;
  t.decoded_pieces += stats.decoded_pieces;
  t.extents_degraded += stats.extents_degraded;
}

}  // namespace kv::client
