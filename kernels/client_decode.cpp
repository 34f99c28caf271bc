// LoadJob: from k shards of a plane to checked bytes in their places. See client_load.hpp.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "client_load.hpp"

namespace kv::client {

void LoadJob::progress(std::unique_lock<std::mutex>& lock, uint32_t e, uint32_t p, Todo& todo) {
  PlaneWork& work = work_[e]->planes[p];
  const uint64_t data = data_mask();
  for (;;) {
    if (over() || work.complete || work.decoding || work_[e]->failed || e >= cut_.load()) return;
    const uint32_t settled = uint32_t(std::popcount((work.good | work.lost | work_[e]->spared) & data));
    if (work.ready_ns == 0 && settled + m_ >= k_ && is_granted({e, uint8_t(p), 0})) work.ready_ns = now_ns();   // else nobody owes it yet
    if ((work.good & data) != data) {
      if (uint32_t(std::popcount(work.good)) < k_) {
        if (work.lost | work.lagging | work_[e]->spared) judge(e, p, todo);
        return;
      }
      const uint64_t missing = data & ~work.good, blocked = missing & work.receiving;
      work.revoked |= missing & ~blocked;
      work.revoke_wanted |= blocked;
      if (blocked) return;   // who is inside comes back here when it leaves
      decode(lock, e, p);
      continue;
    }
    if (drop_liars(e, p)) continue;
    if (digests_hold(e, p) || locate(e, p)) return complete(e, p);
    if (!work.doubted) stats.digest_mismatches++;
    work.doubted = true;
    return judge(e, p, todo);
  }
}

void LoadJob::decode(std::unique_lock<std::mutex>& lock, uint32_t e, uint32_t p) {
  PlaneWork& work = work_[e]->planes[p];
  const PlaneSpec& plane = plan_.planes[p];
  const uint64_t missing = data_mask() & ~work.good;
  uint32_t have[K_MAX], n = 0;
  each(work.good, [&](uint32_t s) {
    if (n < k_) have[n++] = s;
  });
  uint8_t* parity[M_MAX];
  std::copy(std::begin(work.parity), std::end(work.parity), parity);
  work.decoding = true;
  work.decode_begun_ns = now_ns();
  inside_++;
  lock.unlock();
  const bool rebuilt = shared_->codec.rebuild_plane(plan_.extents[e].count, place(e, p), plan_.row_stride, plane.bytes, plane.shard_bytes, have,
                                                   const_cast<const uint8_t* const*>(parity));
  if (rebuilt) hash_rebuilt(e, p, missing);
  lock.lock();
  work.decoding = false;
  work.decode_ended_ns = now_ns();
  if (rebuilt) {
    work.good |= missing;
    work.decoded |= missing;
    stats.decodes++;
    stats.decoded_pieces += plan_.extents[e].count;
    if (!std::exchange(work_[e]->degraded, true)) stats.extents_degraded++;
  } else {
    work.lost |= missing;   // cannot be: the numbers are distinct and in range
    work_[e]->failed = true;
  }
  leave();
}

void LoadJob::hash_rebuilt(uint32_t e, uint32_t p, uint64_t shards) {
  const PlaneSpec& plane = plan_.planes[p];
  std::vector<uint8_t> padded;
  each(shards, [&](uint32_t s) {
    auto* sums = reinterpret_cast<uint64_t*>(checks(e, p, s));
    const uint32_t real = shard_real_bytes(plane.bytes, plane.shard_bytes, s);
    if (real < plane.shard_bytes) padded.assign(plane.shard_bytes, 0);
    for (uint32_t b = 0; b < plan_.extents[e].count; b++) {
      const uint8_t* piece = place(e, p) + b * plan_.row_stride + size_t(s) * plane.shard_bytes;
      if (real < plane.shard_bytes) {
        if (real) std::memcpy(padded.data(), piece, real);
        piece = padded.data();
      }
      sums[b] = shard_sum(piece, plane.shard_bytes, seed(e, p, s, b));
    }
  });
}

void LoadJob::found_bad(uint32_t e, uint64_t shards) {
  const ExtentPlan& x = plan_.extents[e];
  stats.bad_shards += uint32_t(std::popcount(shards));
  each(shards, [&](uint32_t s) { shared_->bad.add({plan_.owner, x.name, x.nodes[s], uint8_t(s), {}}); });
}

// Shards whose digests differ from those of most others are lost. True when there was one.
bool LoadJob::drop_liars(uint32_t e, uint32_t p) {
  PlaneWork& work = work_[e]->planes[p];
  const uint64_t received = work.good & ~work.decoded;
  const size_t bytes = sizeof(Digest) * plan_.extents[e].count;
  uint64_t most = 0;
  each(received, [&](uint32_t s) {
    if (most & bit(s)) return;
    uint64_t same = 0;
    each(received, [&](uint32_t t) {
      if (std::memcmp(digests(e, p, s), digests(e, p, t), bytes) == 0) same |= bit(t);
    });
    if (std::popcount(same) > std::popcount(most)) most = same;
  });
  const uint64_t liars = received & ~most;
  if (!liars) return false;
  found_bad(e, liars);
  work.lost |= liars;
  work.good &= ~(liars | work.decoded);   // what was rebuilt may come from a liar
  const uint64_t undone = work.decoded & ~work.lost;   // these came too late and were thrown away: asked again if nothing else helps
  work.revoked &= ~undone;
  work.turned_to &= ~undone;
  work_[e]->spared |= undone;
  work_[e]->asked &= ~undone;
  work.decoded = 0;
  return true;
}

bool LoadJob::digests_hold(uint32_t e, uint32_t p) const {
  const ExtentPlan& x = plan_.extents[e];
  const PlaneWork& work = work_[e]->planes[p];
  const Digest* expected = digests(e, p, uint32_t(std::countr_zero(work.good & ~work.decoded)));
  uint64_t row[K_MAX];
  for (uint32_t b = 0; b < x.count; b++) {
    for (uint32_t s = 0; s < k_; s++) row[s] = sums(e, p, s)[b];
    const Digest d = plane_digest(plan_.block_keys.data() + size_t(x.row + b) * KEY_BYTES, x.name.write_id, row, k_);
    if (std::memcmp(&d, &expected[b], sizeof d)) return false;
  }
  return true;
}

// Shards whose bytes fit their own sums, but not the others: leave out as many as there are beyond k, in every way, rebuild beside, and see
// whether the digests hold then. At most 66 tries for 12 shards. Rare, so all of it under the extent's lock.
bool LoadJob::locate(uint32_t e, uint32_t p) {
  const PlaneWork& work = work_[e]->planes[p];
  const uint64_t received = work.good & ~work.decoded;
  const uint32_t beyond = uint32_t(std::popcount(received)) - k_;
  if (uint32_t(std::popcount(received)) <= k_) return false;
  std::vector<uint64_t> left_out{0};
  for (uint32_t i = 0; i < beyond; i++) {
    std::vector<uint64_t> more;
    for (uint64_t some : left_out)
      each(received, [&](uint32_t s) {
        if (bit(s) > some) more.push_back(some | bit(s));   // ascending: each set once
      });
    left_out.swap(more);
  }
  return std::any_of(left_out.begin(), left_out.end(), [&](uint64_t out) { return holds_from(e, p, received & ~out); });
}

// Rebuilds the data shards that are not among these k beside the places; puts them in their places when all digests hold.
bool LoadJob::holds_from(uint32_t e, uint32_t p, uint64_t from) {
  PlaneWork& work = work_[e]->planes[p];
  const PlaneSpec& plane = plan_.planes[p];
  const ExtentPlan& x = plan_.extents[e];
  const uint32_t piece = plane.shard_bytes;
  const uint64_t missing = data_mask() & ~from;
  uint32_t have[K_MAX], want[M_MAX], n = 0, wanted = 0;
  if (uint32_t(std::popcount(missing)) > m_) return false;
  each(from, [&](uint32_t s) { have[n++] = s; });
  each(missing, [&](uint32_t s) { want[wanted++] = s; });
  const Digest* expected = digests(e, p, have[0]);
  std::vector<uint8_t> padded(size_t(piece) * k_), rebuilt(size_t(piece) * x.count * wanted);
  auto shard_at = [&](uint32_t s, uint32_t b) -> const uint8_t* {
    if (s >= k_) return work.parity[s - k_] + size_t(b) * piece;
    const uint8_t* at = place(e, p) + b * plan_.row_stride + size_t(s) * piece;
    const uint32_t real = shard_real_bytes(plane.bytes, piece, s);
    if (real == piece) return at;
    uint8_t* whole = padded.data() + size_t(s) * piece;
    if (real) std::memcpy(whole, at, real);
    return whole;
  };
  for (uint32_t b = 0; b < x.count; b++) {
    const uint8_t* in[K_MAX];
    uint8_t* out[M_MAX];
    uint64_t row[K_MAX];
    for (uint32_t i = 0; i < k_; i++) in[i] = shard_at(have[i], b);
    for (uint32_t j = 0; j < wanted; j++) out[j] = rebuilt.data() + (size_t(j) * x.count + b) * piece;
    for (uint32_t s = 0; s < k_; s++) row[s] = sums(e, p, s)[b];
    if (!shared_->codec.decode(piece, have, in, want, wanted, out)) return false;
    for (uint32_t j = 0; j < wanted; j++) row[want[j]] = shard_sum(out[j], piece, seed(e, p, want[j], b));
    const Digest d = plane_digest(plan_.block_keys.data() + size_t(x.row + b) * KEY_BYTES, x.name.write_id, row, k_);
    if (std::memcmp(&d, &expected[b], sizeof d)) return false;
  }
  for (uint32_t j = 0; j < wanted; j++)
    for (uint32_t b = 0; b < x.count; b++)
      if (const uint32_t real = shard_real_bytes(plane.bytes, piece, want[j]))
        std::memcpy(place(e, p) + b * plan_.row_stride + size_t(want[j]) * piece, rebuilt.data() + (size_t(j) * x.count + b) * piece, real);
  found_bad(e, work.good & ~work.decoded & ~from);
  stats.decodes++;
  work.decoded |= missing;
  return true;
}

void LoadJob::complete(uint32_t e, uint32_t p) {
  PlaneWork& work = work_[e]->planes[p];
  work.complete = true;
  work.complete_ns = now_ns();
  work.revoked |= data_mask() & ~work.good;
  free_parity(work, e, p);
  if (!work.decoded && work.ready_ns) shared_->delay.add(work.complete_ns - work.ready_ns);
  {
    std::lock_guard lock(mutex_);
    done_[size_t(e) * plane_count_ + p] = 1;
    const uint32_t cut = cut_.load();
    if (e >= cut || ++plane_done_[p] != cut) return;
  }
  changed_.notify_all();   // with the lock, who wakes would wait for it, perhaps behind all that runs here
}

// --- BadShards ---

void BadShards::add(const BadShard& one) {
  std::lock_guard lock(mutex_);
  if (kept_.size() < KEPT_MAX && std::find(kept_.begin(), kept_.end(), one) == kept_.end()) kept_.push_back(one);
  any_.store(true, std::memory_order_relaxed);
}

std::vector<BadShard> BadShards::take() {
  if (!any_.load(std::memory_order_relaxed)) return {};   // after nearly every load
  std::lock_guard lock(mutex_);
  any_.store(false, std::memory_order_relaxed);
  return std::exchange(kept_, {});
}

// --- Scratch ---

Scratch::~Scratch() {
  for (auto& [bytes, list] : free_)
    for (uint8_t* buffer : list) std::free(buffer);
}

uint8_t* Scratch::take(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    auto found = free_.find(bytes);
    if (found != free_.end() && !found->second.empty()) {
      uint8_t* buffer = found->second.back();
      found->second.pop_back();
      kept_bytes_ -= bytes;
      return buffer;
    }
  }
  auto* buffer = static_cast<uint8_t*>(std::aligned_alloc(64, align_up(bytes, 64)));
  if (!buffer) throw std::bad_alloc();
  held_bytes_ += bytes;
  return buffer;
}

void Scratch::give(uint8_t* buffer, size_t bytes) {
  if (!buffer) return;
  {
    std::lock_guard lock(mutex_);
    if (kept_bytes_ + bytes <= KEPT_BYTES_MAX) {
      free_[bytes].push_back(buffer);
      kept_bytes_ += bytes;
      return;
    }
  }
  held_bytes_ -= bytes;
  std::free(buffer);
}

}  // namespace kv::client
