// Stores: records are made here and sent by WriteConn. See client_store.hpp.
#include "client_store.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "client_small.hpp"
#include "priority.hpp"
#include "record.hpp"

namespace kv::client {

using wire::FrameHeader;

// --- StoreExtent: records ---

StoreExtent::StoreExtent(Writer& writer, std::shared_ptr<StoreJob> job, uint32_t index)
    : writer_(writer), job_(std::move(job)), index_(index), k_(writer.shared->codec.k()), m_(writer.shared->codec.m()) {}

StoreExtent::~StoreExtent() { writer_.shared->scratch.give(parity_, parity_bytes_); }

void StoreExtent::encode() {
  const StorePlan& job = job_->plan;
  const StoreExtentPlan& x = plan();
  const uint32_t planes = uint32_t(job.planes.size()), blocks = x.count, shards = k_ + m_;
  std::vector<uint32_t> earlier = job.earlier;
  for (uint32_t i = 0; i < index_; i++) earlier.push_back(job.extents[i].start_block);
  if (earlier.size() > EARLIER_MAX) earlier.erase(earlier.begin(), earlier.end() - EARLIER_MAX);
  const uint32_t head_bytes = head_bytes_of(planes, uint32_t(earlier.size()), blocks);
  const uint64_t checks_bytes = checks_bytes_of(planes, blocks);
  prefix_bytes_ = sizeof(FrameHeader) + head_bytes + checks_bytes;
  prefix_stride_ = align_up(prefix_bytes_, 64);
  prefixes_.reset(new uint8_t[prefix_stride_ * shards]);
  for (const PlaneSpec& plane : job.planes) {
    plane_at_.push_back(payload_bytes_);
    payload_bytes_ += uint64_t(plane.shard_bytes) * blocks;
  }
  parity_bytes_ = payload_bytes_ * m_;
  if (m_) parity_ = writer_.shared->scratch.take(parity_bytes_);
  cut_.resize(planes);

  auto sums = [&](uint32_t s) { return reinterpret_cast<uint64_t*>(prefix(s) + sizeof(FrameHeader) + head_bytes); };
  std::vector<Digest> digests(size_t(planes) * blocks);
  const uint8_t* rows = job.base + size_t(x.row) * job.row_stride;
  const uint8_t* keys = job.block_keys.data() + size_t(x.row) * KEY_BYTES;
  ShardIdentity id{};
  std::memcpy(id.owner, job.owner.data(), OWNER_BYTES);
  std::memcpy(id.extent_key, keys, KEY_BYTES);
  id.write_id = x.write_id;
  for (uint32_t p = 0; p < planes; p++) {
    const PlaneSpec& plane = job.planes[p];
    const uint32_t piece = plane.shard_bytes;
    Cut& cut = cut_[p];
    cut.first = std::min(k_, plane.bytes / piece);
    if (cut.first < k_) cut.bytes.reset(new uint8_t[size_t(k_ - cut.first) * piece * blocks]());
    for (uint32_t b = 0; b < blocks; b++) {
      const uint8_t* at = rows + b * job.row_stride + plane.offset;
      const uint8_t* data[K_MAX];
      uint8_t* parity[M_MAX];
      for (uint32_t s = 0; s < cut.first; s++) data[s] = at + size_t(s) * piece;
      for (uint32_t s = cut.first; s < k_; s++) {
        uint8_t* padded = cut.bytes.get() + (size_t(s - cut.first) * blocks + b) * piece;
        if (uint32_t real = shard_real_bytes(plane.bytes, piece, s)) std::memcpy(padded, at + size_t(s) * piece, real);
        data[s] = padded;
      }
      for (uint32_t j = 0; j < m_; j++) parity[j] = parity_ + payload_bytes_ * j + plane_at_[p] + size_t(b) * piece;
      if (m_) writer_.shared->codec.encode(piece, data, parity);
      id.plane = p;
      id.block = b;
      uint64_t row[K_MAX];
      for (uint32_t s = 0; s < shards; s++) {
        id.shard = s;
        const uint64_t sum = shard_sum(s < k_ ? data[s] : parity[s - k_], piece, shard_seed(id));
        sums(s)[size_t(p) * blocks + b] = sum;
        if (s < k_) row[s] = sum;
      }
      digests[size_t(p) * blocks + b] = plane_digest(keys + size_t(b) * KEY_BYTES, x.write_id, row, k_);
    }
  }
  RecordHead head{};
  head.magic = RECORD_MAGIC;
  head.version = RECORD_VERSION;
  head.head_bytes = head_bytes;
  head.record_bytes = head_bytes + checks_bytes + payload_bytes_;
  std::memcpy(head.owner, job.owner.data(), OWNER_BYTES);
  std::memcpy(head.extent_key, keys, KEY_BYTES);
  head.write_id = x.write_id;
  head.k = uint8_t(k_);
  head.m = uint8_t(m_);
  head.plane_count = uint8_t(planes);
  head.block_count = uint16_t(blocks);
  head.earlier_count = uint16_t(earlier.size());
  head.start_block = x.start_block;
  head.pg = x.pg;
  head.write_epoch = job.write_epoch;
  head.bucket = job.bucket;
  head.created_unix_ms = uint64_t(std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count());
  head.retention_class = job.retention_class;
  head.fidelity = job.fidelity;
  head.depth = job.depth;
  head.kv_group = job.kv_group;
  head.block_bytes = job.block_bytes;
  head.layout_tag = job.layout_tag;
  for (uint32_t s = 0; s < shards; s++) {
    uint8_t* record = prefix(s) + sizeof(FrameHeader);
    uint8_t* checks = record + head_bytes;
    std::memcpy(checks + 8ull * planes * blocks, digests.data(), digests.size() * sizeof(Digest));
    head.shard = uint8_t(s);
    head.head_sum = 0;
    head.checks_sum = XXH3_64bits(checks, checks_bytes);
    std::memset(record, 0, head_bytes);
    std::memcpy(record, &head, sizeof head);
    uint8_t* at = record + sizeof head;
    for (const PlaneSpec& plane : job.planes) {
      const PlaneEntry entry{plane.bytes, plane.shard_bytes};
      std::memcpy(at, &entry, sizeof entry);
      at += sizeof entry;
    }
    if (!earlier.empty()) std::memcpy(at, earlier.data(), 4 * earlier.size());
    uint8_t* tags = record + head_bytes - 8ull * blocks;
    for (uint32_t b = 0; b < blocks; b++) {
      const uint64_t tag = block_tag(keys + size_t(b) * KEY_BYTES);
      std::memcpy(tags + 8ull * b, &tag, 8);
    }
    const uint64_t sum = head_sum_of(record, head_bytes);
    std::memcpy(record + offsetof(RecordHead, head_sum), &sum, 8);
    const FrameHeader frame = request_header(wire::Verb::WRITE, 0, uint32_t(head.record_bytes), 0);
    std::memcpy(prefix(s), &frame, sizeof frame);
  }
}

void StoreExtent::name_request(const WriteTask& task) { std::memcpy(prefix(task.shard) + offsetof(FrameHeader, request_id), &task.request_id, 8); }

uint32_t StoreExtent::parts(const WriteTask& task, uint64_t bytes_max, iovec* out, uint32_t max) const {
  const StorePlan& job = job_->plan;
  const StoreExtentPlan& x = plan();
  uint64_t at = task.sent, want = 0;
  uint32_t n = 0;
  auto part = [&](const uint8_t* from, uint64_t bytes) {
    out[n++] = {const_cast<uint8_t*>(from), size_t(bytes)};
    want += bytes;
    at += bytes;
  };
  if (at < prefix_bytes_) part(prefix(task.shard) + at, prefix_bytes_ - at);
  if (task.shard >= k_ && at < task.bytes && n < max)
    part(parity_ + payload_bytes_ * (task.shard - k_) + (at - prefix_bytes_), std::min(task.bytes - at, bytes_max));
  for (uint32_t p = 0; task.shard < k_ && p < job.planes.size(); p++) {
    const PlaneSpec& plane = job.planes[p];
    const uint64_t piece = plane.shard_bytes, start = prefix_bytes_ + plane_at_[p], end = start + piece * x.count;
    while (at < end && n < max && want < bytes_max) {
      const uint64_t in_plane = at - start, block = in_plane / piece, skip = in_plane % piece;
      if (task.shard >= cut_[p].first)
        part(cut_[p].bytes.get() + (task.shard - cut_[p].first) * piece * x.count + in_plane, end - at);
      else
        part(job.base + (x.row + block) * job.row_stride + plane.offset + task.shard * piece + skip, piece - skip);
    }
  }
  return n;
}

// --- StoreExtent: life ---

void count_failed(StoreStats& stats, Outcome why) {
  stats.shards_failed++;
  switch (why) {
    case outcome(Status::NO_SPACE): stats.shards_no_space++; break;
    case outcome(Status::BUSY): stats.shards_busy++; break;
    case outcome(Status::STALE_MAP): stats.shards_stale_map++; break;
    case outcome(Status::DRAINING): stats.shards_draining++; break;
    case outcome(Fault::UNREACHABLE):
    case outcome(Fault::BROKEN):
    case outcome(Fault::STALLED): stats.shards_unreachable++; break;
    default: break;
  }
}

void StoreExtent::send() {
  Net& net = *writer_.shared->net;
  const StoreExtentPlan& x = plan();
  std::vector<std::pair<std::shared_ptr<WriteConn>, std::shared_ptr<WriteTask>>> ready;
  for (uint32_t s = 0; s < k_ + m_; s++) {
    auto task = std::make_shared<WriteTask>();
    task->extent = shared_from_this();
    task->shard = s;
    task->bytes = shard_frame_bytes();
    auto conn = x.nodes[s] >= 0 && size_t(x.nodes[s]) < net.nodes.size() ? WriteConn::of(net, *net.nodes[size_t(x.nodes[s])], writer_) : nullptr;
    if (!conn) {
      count_failed(writer_.stats, outcome(Fault::UNREACHABLE));
      continue;
    }
    task->node = uint32_t(x.nodes[s]);
    ready.emplace_back(std::move(conn), std::move(task));
  }
  std::lock_guard lock(mutex_);
  started_ns_ = now_ns();
  if (ready.size() < k_) return resolve(Stored::FAILED);   // nothing was sent
  pending_ = refers_ = uint32_t(ready.size());
  for (auto& [conn, task] : ready) {
    tasks_.push_back(task);
    conn->loop.post([conn = conn, task = task] { conn->add(task); });
  }
}

void StoreExtent::on_result(WriteTask& task, Outcome result) {
  std::lock_guard lock(mutex_);
  if (task.gone) return;
  task.gone = true;
  pending_--;
  if (result == outcome(Status::OK) || result == outcome(Status::EXISTS)) {
    acks_++;
    writer_.stats.shards_acknowledged++;
    writer_.ack_delay.add(now_ns() - started_ns_);
  } else {
    count_failed(writer_.stats, result);
    busy_ += result == outcome(Status::BUSY);
  }
  if (acks_ == k_ && enough_ns_ == 0) enough_ns_ = now_ns();
  if (outcome_ != Stored::PENDING) return;
  if (acks_ >= std::min(k_ + 1, k_ + m_))
    resolve(Stored::STORED);
  else if (acks_ + pending_ < k_)
    resolve(Stored::FAILED);
  else if (pending_ == 0)
    resolve(acks_ >= k_ ? Stored::DEGRADED : Stored::FAILED);
}

void StoreExtent::on_stale(uint64_t epoch) {
  writer_.shared->net->heard_epoch(epoch);
  std::lock_guard lock(mutex_);
  if (epoch > job_->plan.write_epoch) newer_epoch_ = std::max(newer_epoch_, epoch);
}

void StoreExtent::on_released(WriteTask& task) {
  std::lock_guard lock(mutex_);
  if (!task.refers) return;
  task.refers = false;
  refers_--;
  finish_if_released();
}

void StoreExtent::resolve(Stored result) {
  outcome_ = result;
  if (result == Stored::FAILED && !tasks_.empty()) withdraw();
  for (auto& task : tasks_) {
    if (!task->refers) continue;
    Node& node = *writer_.shared->net->nodes[task->node];
    Loop& loop = writer_.shared->net->write_loop(node.index);
    loop.post([&node, task] {
      std::shared_ptr<WriteConn> conn;
      {
        std::lock_guard lock(node.mutex);
        conn = node.write;
      }
      if (conn) return conn->set_aside(task);
      if (auto extent = task->extent) extent->on_released(*task);   // its connection ended meanwhile
    });
  }
  finish_if_released();
}

void StoreExtent::finish_if_released() {
  if (outcome_ == Stored::PENDING || refers_ || finished_) return;
  finished_ = true;
  tasks_.clear();   // they hold this extent
  writer_.finished(*this, job_, index_, outcome_, acks_, newer_epoch_, true);
}

bool StoreExtent::lagging(int64_t now) {
  std::lock_guard lock(mutex_);
  if (outcome_ != Stored::PENDING) return false;
  const int64_t lag = std::max(writer_.config.lag_floor_ns, writer_.ack_delay.delay());
  const bool slow = enough_ns_ && now - enough_ns_ > lag;
  if (!slow && now - started_ns_ < writer_.config.deadline_ns) return true;
  for (auto& task : tasks_)
    if (!task->gone) writer_.shared->net->nodes[task->node]->mark_late(now);
  resolve(acks_ >= k_ ? Stored::DEGRADED : Stored::FAILED);
  return false;
}

void StoreExtent::drop() {
  std::lock_guard lock(mutex_);
  outcome_ = Stored::DROPPED;
  finished_ = true;
  writer_.finished(*this, job_, index_, outcome_, 0, 0, false);
}

void StoreExtent::abandon() {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  if (outcome_ == Stored::PENDING) outcome_ = Stored::FAILED;
  refers_ = 0;
  finish_if_released();
}

// The shards that did arrive are useless: every node of the list forgets them and refuses late ones.
void StoreExtent::withdraw() {
  wire::WithdrawRequest head{};
  std::memcpy(head.owner, job_->plan.owner.data(), OWNER_BYTES);
  head.count = 1;
  wire::WritingName name;
  std::memcpy(name.extent_key, job_->plan.block_keys.data() + size_t(plan().row) * KEY_BYTES, KEY_BYTES);
  name.write_id = plan().write_id;
  std::vector<uint8_t> body(sizeof head + sizeof name);
  std::memcpy(body.data(), &head, sizeof head);
  std::memcpy(body.data() + sizeof head, &name, sizeof name);
  std::vector<int32_t> nodes(plan().nodes, plan().nodes + k_ + m_);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  writer_.stats.withdrawals++;
  auto call = std::make_shared<RpcCall>(writer_.shared->net, 0);
  for (int32_t node : nodes)
    if (node >= 0) call->ask(uint32_t(node), wire::Verb::WITHDRAW, body);
}

// --- Writer ---

Writer::Writer(std::shared_ptr<LoadShared> s, const StoreConfig& c) : shared(std::move(s)), config(c), ack_delay(c.lag_floor_ns, 2 * SECOND, 8.0) {}

Writer::~Writer() { stop(); }

void Writer::start() {
  thread_ = std::thread([this] { run(); });
}

uint64_t Writer::add(StorePlan plan) {
  auto job = std::make_shared<StoreJob>();
  job->plan = std::move(plan);
  job->open = uint32_t(job->plan.extents.size());
  job->outcomes.resize(job->open);
  job->acks.resize(job->open);
  std::vector<std::shared_ptr<StoreExtent>> dropped;
  {
    std::lock_guard lock(mutex_);
    job->id = next_job_++;
    if (job->open == 0) {
      done_.push_back({job->id, {}, {}, 0});
      done_changed_.notify_all();
    }
    for (uint32_t i = 0; i < job->plan.extents.size(); i++) {
      auto extent = std::make_shared<StoreExtent>(*this, job, i);
      if (stopping_) {
        dropped.push_back(std::move(extent));
        continue;
      }
      queued_bytes_ += extent->user_bytes();
      queue_.push_back(std::move(extent));
      while (queued_bytes_ > config.queue_bytes_max && !queue_.empty()) {
        queued_bytes_ -= queue_.front()->user_bytes();
        dropped.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
    }
    stats.queued_bytes = queued_bytes_;
    changed_.notify_all();
  }
  for (auto& extent : dropped) extent->drop();
  return job->id;
}

void Writer::finished(StoreExtent& extent, const std::shared_ptr<StoreJob>& job, uint32_t index, Stored outcome, uint32_t acks, uint64_t newer_epoch,
                      bool in_flight) {
  const uint64_t bytes = extent.user_bytes();
  switch (outcome) {
    case Stored::DEGRADED: stats.extents_degraded++; [[fallthrough]];
    case Stored::STORED: stats.extents_stored++, stats.bytes_stored += bytes; break;
    case Stored::DROPPED: stats.extents_dropped++, stats.bytes_dropped += bytes; break;
    default:
      stats.extents_failed++;
      (extent.too_many_busy() ? stats.bytes_busy : stats.bytes_failed) += bytes;
  }
  std::lock_guard lock(mutex_);
  job->outcomes[index] = uint8_t(outcome);
  job->acks[index] = uint8_t(acks);
  job->newer_epoch = std::max(job->newer_epoch, newer_epoch);
  if (in_flight) {
    flight_bytes_ -= bytes;
    stats.flight_bytes = flight_bytes_;
    std::erase_if(flight_, [&](const auto& e) { return e.get() == &extent; });
  }
  if (--job->open == 0) {
    done_.push_back({job->id, job->outcomes, job->acks, job->newer_epoch});
    done_changed_.notify_all();
  }
  changed_.notify_all();
}

std::vector<Writer::Done> Writer::wait_done(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  done_changed_.wait_for(lock, std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, 3600 * SECOND)), [this] { return over_ || !done_.empty(); });
  return std::exchange(done_, {});
}

void Writer::stop() {
  std::vector<std::shared_ptr<StoreExtent>> dropped;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.assign(queue_.begin(), queue_.end());
    queue_.clear();
    stats.queued_bytes = queued_bytes_ = 0;
    changed_.notify_all();
  }
  for (auto& extent : dropped) extent->drop();
  if (thread_.joinable()) thread_.join();
}

// After the loops have ended: nobody is left to touch the caller's memory, or to answer.
void Writer::abandon() {
  std::vector<std::shared_ptr<StoreExtent>> flight;
  {
    std::lock_guard lock(mutex_);
    flight = flight_;
  }
  for (auto& extent : flight) extent->abandon();
  std::lock_guard lock(mutex_);
  over_ = true;
  done_changed_.notify_all();
}

void Writer::run() {
  pthread_setname_np(pthread_self(), "kv-client-store");
  give_way_to_loads();
  constexpr auto CHECK = std::chrono::milliseconds(20);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool room = flight_bytes_ < config.flight_bytes_max;
    if (!queue_.empty() && room) {
      auto extent = std::move(queue_.front());
      queue_.pop_front();
      const uint64_t bytes = extent->user_bytes();
      queued_bytes_ -= bytes;
      flight_bytes_ += bytes;
      stats.queued_bytes = queued_bytes_;
      stats.flight_bytes = flight_bytes_;
      flight_.push_back(extent);
      lock.unlock();
      extent->encode();
      extent->send();
      extent = nullptr;
      lock.lock();
    }
    if (!flight_.empty()) {
      auto flight = flight_;
      lock.unlock();
      const int64_t now = now_ns();
      for (auto& extent : flight) extent->lagging(now);
      flight.clear();
      lock.lock();
    }
    if (stopping_ || (!queue_.empty() && flight_bytes_ < config.flight_bytes_max)) continue;
    if (flight_.empty())
      changed_.wait(lock);
    else
      changed_.wait_for(lock, CHECK);
  }
}

}  // namespace kv::client
