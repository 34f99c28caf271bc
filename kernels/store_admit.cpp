// Which writes a node votes for: what was asked for before (second touch), and as much as its write budget allows.
//
// The vote of one node decides nothing: the writer asks all twelve before it sends anything, and the majority decides for all of them
// (kvstore/client/admission.py). A put is never refused for it.
#include <time.h>

#include <algorithm>

#include "store_impl.hpp"

namespace kv {

namespace {

constexpr uint32_t SEEN_SECONDS = 12 * 3600;   // a generation: what was asked for is known for 12 to 24 hours
constexpr double DAY_SECONDS = 86400;
constexpr double BURST_SHARE = 1.0 / 24;       // of a day's budget: may be written at once, and overdrawn by what was asked for before

}  // namespace

void StoreImpl::set_admission(bool second_touch, uint64_t budget_bytes_per_day) {
  std::lock_guard lock(admit_mutex_);
  second_touch_ = second_touch;
  budget_per_day_ = double(budget_bytes_per_day);
  budget_left_ = budget_per_day_ * BURST_SHARE;
  budget_at_ = 0;
}

// Seconds of the clock that buckets are of.
double StoreImpl::clock_seconds() const {
  return config_.virtual_clock ? double(virtual_bucket_) * config_.bucket_seconds : double(time(nullptr));
}

void StoreImpl::refill_locked() {
  const double now = clock_seconds(), passed = budget_at_ > 0 ? std::max(0.0, now - budget_at_) : 0;
  budget_left_ = std::min(budget_per_day_ * BURST_SHARE, budget_left_ + passed * budget_per_day_ / DAY_SECONDS);
  budget_at_ = now;
}

void StoreImpl::spend(uint64_t bytes) {
  std::lock_guard lock(admit_mutex_);
  if (budget_per_day_ <= 0) return;
  refill_locked();
  budget_left_ -= double(bytes);
}

void StoreImpl::admit(const Owner& owner, const uint8_t* keys, uint32_t count, uint32_t bucket, uint32_t* votes) {
  bucket = clamp_bucket(bucket);
  std::lock_guard lock(admit_mutex_);
  if (!second_touch_ && budget_per_day_ <= 0) {
    std::fill_n(votes, count, uint32_t(Vote::YES));
    return;
  }
  // The client's bucket, not the time here, ends a generation: the twelve forget alike.
  const uint64_t generation = uint64_t(bucket) * config_.bucket_seconds / SEEN_SECONDS;
  for (; asked_generation_ < generation; asked_generation_ = std::max(asked_generation_ + 1, generation - 1)) asked_.rotate();
  if (budget_per_day_ > 0) refill_locked();
  const bool over = budget_per_day_ > 0 && budget_left_ <= 0;
  const bool overdrawn = budget_per_day_ > 0 && budget_left_ <= -budget_per_day_ * BURST_SHARE;
  for (uint32_t i = 0; i < count; i++) {
    const uint64_t hash = CuckooFilter::hash(group_key(owner, keys + size_t(i) * KEY_BYTES).data());
    const bool seen = asked_.has(hash);
    asked_.add(hash);
    if (asked_.count() >= asked_.keys_max()) asked_.rotate();
    const Vote vote = overdrawn ? Vote::BUDGET : seen || !(second_touch_ || over) ? Vote::YES : over ? Vote::BUDGET : Vote::UNSEEN;
    votes[i] = uint32_t(vote);
    counters_.votes[size_t(vote)]++;
  }
}

}  // namespace kv
