// What the store knows for a short while only, in RAM and bounded: promised writings (pins), last uses not yet in the index (touches),
// writings that were withdrawn (tombstones).
#pragma once
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "index.hpp"

namespace kv {

struct NameHash {
  size_t operator()(const NameKey& name) const { return XXH3_64bits(name.data(), name.size()); }
};

// Promised writings, by a 128-bit fingerprint of their name: two names that share one would only keep a writing longer.
// A writing about to be deleted is marked `dying` in the same table, so a promise and a deletion of one writing exclude each other.
//
// A pin also says what the index said when it was made: while it lives nothing can go, so the next promise of the same writing need not ask
// the index again. It forgets that when shards are added, and with a deletion that ignores pins.
class Pins {
 public:
  explicit Pins(uint32_t pins_max) : shard_max_(pins_max / SHARDS + 1) {}

  struct Known { uint64_t shard_mask = 0; uint32_t bucket = 0; uint8_t retention_class = 0; };   // as in the index; 0 shards: nothing

  // What is known of a writing that is pinned now; its pin is made longer. Nothing where it is not pinned.
  Known renew(const NameKey& name, uint32_t now_seconds, uint32_t until_seconds) {
    Known known;
    change(name, [&](Slot& slot) {
      if (slot.until <= now_seconds || !slot.known.shard_mask) return;
      slot.until = std::max(slot.until, until_seconds);
      known = slot.known;
    });
    return known;
  }
  // `seen`: changes() from before the index was read. Where something was added to the index since, nothing is kept.
  void remember(const NameKey& name, const Known& known, uint64_t seen) {
    change(name, [&](Slot& slot) {
      if (changes_.load() == seen) slot.known = known;
    });
  }
  // The writing was used again, and that is noted elsewhere for the index.
  void touched(const NameKey& name, uint32_t bucket, uint8_t retention_class) {
    change(name, [&](Slot& slot) {
      slot.known.bucket = bucket;
      slot.known.retention_class = retention_class;
    });
  }
  uint64_t changes() const { return changes_.load(); }
  // After shards of it were added to the index. (The count first: who remembers under the slot's lock sees it, or is overruled here.)
  void forget(const NameKey& name) {
    changes_++;
    change(name, [](Slot& slot) { slot.known = {}; });
  }
  void forget_all() {
    changes_++;
    for (Shard& s : shards_) {
      std::lock_guard lock(s.mutex);
      for (Slot& slot : s.slots) slot.known = {};
    }
  }

  enum class Pinned { NEW, EXTENDED, FULL, DYING };
  Pinned pin(const NameKey& name, uint32_t now_seconds, uint32_t until_seconds) {
    const XXH128_hash_t h = hash(name);
    Shard& s = shard(h);
    std::lock_guard lock(s.mutex);
    Slot* slot = s.find(h);
    if (slot->until == DYING_MARK) return Pinned::DYING;
    if (slot->until) {
      const bool live = slot->until > now_seconds;
      slot->until = std::max(slot->until, until_seconds);
      return live ? Pinned::EXTENDED : Pinned::NEW;
    }
    if (!s.room(now_seconds, shard_max_)) return Pinned::FULL;
    slot = s.find(h);
    *slot = {h.low64, h.high64, until_seconds, {}};
    s.used++;
    return Pinned::NEW;
  }

  // Marks a writing whose deletion is about to commit. False: it is pinned (the caller leaves it alone). `force` ignores pins.
  bool begin_delete(const NameKey& name, uint32_t now_seconds, bool force) {
    const XXH128_hash_t h = hash(name);
    Shard& s = shard(h);
    std::lock_guard lock(s.mutex);
    Slot* slot = s.find(h);
    if (!force && slot->until != DYING_MARK && slot->until > now_seconds) return false;
    if (!slot->until) {
      s.room(now_seconds, UINT32_MAX);
      slot = s.find(h);
      s.used++;
    }
    *slot = {h.low64, h.high64, DYING_MARK, {}};
    return true;
  }
  void end_delete(const NameKey& name) {
    const XXH128_hash_t h = hash(name);
    Shard& s = shard(h);
    std::lock_guard lock(s.mutex);
    Slot* slot = s.find(h);
    if (slot->until == DYING_MARK) slot->until = 1;   // long past: goes with the next purge
  }

  uint64_t live(uint32_t now_seconds) {
    uint64_t n = 0;
    for (Shard& s : shards_) {
      std::lock_guard lock(s.mutex);
      for (const Slot& slot : s.slots) n += slot.until > now_seconds && slot.until != DYING_MARK;
    }
    return n;
  }

 private:
  static constexpr uint32_t SHARDS = 16, DYING_MARK = UINT32_MAX;
  struct Slot {
    uint64_t low = 0, high = 0;
    uint32_t until = 0;   // 0: never used
    Known known;
  };
  struct Shard {
    std::mutex mutex;
    std::vector<Slot> slots = std::vector<Slot>(64);
    uint32_t used = 0;
    Slot* find(const XXH128_hash_t& h) {
      for (size_t i = h.low64 & (slots.size() - 1);; i = (i + 1) & (slots.size() - 1))
        if (!slots[i].until || (slots[i].low == h.low64 && slots[i].high == h.high64)) return &slots[i];
    }
    // Room for one more; drops what has expired when the table is two thirds full. False: `max` live ones are there.
    bool room(uint32_t now_seconds, uint32_t max) {
      if (used < max && used * 3 < slots.size() * 2) return true;
      if (used >= max && purged_at == now_seconds) return false;   // at most once a second
      purged_at = now_seconds;
      std::vector<Slot> old;
      old.swap(slots);
      uint32_t live = 0;
      for (const Slot& slot : old) live += slot.until > now_seconds;
      size_t size = 64;
      while (live * 2 >= size) size *= 2;
      slots.assign(size, {});
      used = live;
      for (const Slot& slot : old)
        if (slot.until > now_seconds) *find({slot.low, slot.high}) = slot;
      return used < max;
    }
    uint32_t purged_at = 0;
  };
  // apply(slot) under its lock; not where there is none, nor one that is dying.
  template <class Change>
  void change(const NameKey& name, Change&& apply) {
    const XXH128_hash_t h = hash(name);
    Shard& s = shard(h);
    std::lock_guard lock(s.mutex);
    if (Slot* slot = s.find(h); slot->until && slot->until != DYING_MARK) apply(*slot);
  }
  static XXH128_hash_t hash(const NameKey& name) { return XXH3_128bits(name.data(), name.size()); }
  Shard& shard(const XXH128_hash_t& h) { return shards_[h.high64 % SHARDS]; }

  const uint32_t shard_max_;
  std::atomic<uint64_t> changes_{0};
  Shard shards_[SHARDS];
};

struct Touch {
  uint32_t bucket;
  uint8_t retention_class;
  bool operator==(const Touch&) const = default;
};

// Last uses waiting for the next flush. Past the bound a touch is dropped and counted: the extent then looks a little older.
class Touches {
 public:
  using Map = std::unordered_map<NameKey, Touch, NameHash>;
  static constexpr size_t WAITING_MAX = 1u << 17;

  // `longer(a, b)`: class a is kept longer than class b.
  template <class Longer>
  bool add(const NameKey& name, Touch touch, Longer longer) {
    std::lock_guard lock(mutex_);
    auto it = map_.find(name);
    if (it == map_.end()) return map_.size() < WAITING_MAX && map_.emplace(name, touch).second;
    it->second.bucket = std::max(it->second.bucket, touch.bucket);
    if (longer(touch.retention_class, it->second.retention_class)) it->second.retention_class = touch.retention_class;
    return true;
  }
  bool waiting(const NameKey& name) {
    std::lock_guard lock(mutex_);
    return map_.contains(name);
  }
  std::vector<std::pair<NameKey, Touch>> some(size_t count_max) {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<NameKey, Touch>> out;
    for (auto it = map_.begin(); it != map_.end() && out.size() < count_max; ++it) out.emplace_back(*it);
    return out;
  }
  // These are in the index; what was touched again meanwhile stays.
  void done(const std::vector<std::pair<NameKey, Touch>>& touches) {
    std::lock_guard lock(mutex_);
    for (const auto& [name, touch] : touches)
      if (const auto it = map_.find(name); it != map_.end() && it->second == touch) map_.erase(it);
  }
  size_t size() {
    std::lock_guard lock(mutex_);
    return map_.size();
  }

 private:
  std::mutex mutex_;
  Map map_;
};

class Tombstones {
 public:
  static constexpr uint32_t SECONDS = 60;
  static constexpr size_t COUNT_MAX = 1u << 17;

  bool add(const NameKey& name, uint32_t now_seconds) {   // false: full
    std::lock_guard lock(mutex_);
    if (map_.size() >= COUNT_MAX && purged_at_ != now_seconds) purge_locked(now_seconds);   // at most once a second
    if (map_.size() >= COUNT_MAX) return false;
    map_[name] = now_seconds + SECONDS;
    return true;
  }
  bool has(const NameKey& name, uint32_t now_seconds) {
    std::lock_guard lock(mutex_);
    const auto it = map_.find(name);
    return it != map_.end() && it->second > now_seconds;
  }
  void purge(uint32_t now_seconds) {
    std::lock_guard lock(mutex_);
    purge_locked(now_seconds);
  }

 private:
  void purge_locked(uint32_t now_seconds) {
    std::erase_if(map_, [&](const auto& row) { return row.second <= now_seconds; });
    purged_at_ = now_seconds;
  }
  std::mutex mutex_;
  uint32_t purged_at_ = 0;
  std::unordered_map<NameKey, uint32_t, NameHash> map_;
};

}  // namespace kv
