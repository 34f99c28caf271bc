// Shards that readers call bad and that this node has not looked at yet: a small queue, and names of the last minute. All calls are thread-safe.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>

#include "index.hpp"

namespace kv {

class Suspects {
 public:
  static constexpr size_t WAITING_MAX = 64;
  static constexpr size_t KNOWN_MAX = 8192;        // 1 MB; at most 128 are looked at in a second
  static constexpr uint64_t AGAIN_MS = 60'000;

  // False: no room, or it waits already, or was looked at less than a minute ago.
  bool add(const EntryKey& name, uint64_t now_ms) {
    {
      std::lock_guard lock(mutex_);
      for (; !looked_at_.empty() && now_ms - looked_at_.front().first >= AGAIN_MS; looked_at_.pop_front()) known_.erase(looked_at_.front().second);
      if (waiting_.size() >= WAITING_MAX || known_.size() >= KNOWN_MAX || !known_.insert(name).second) return false;
      waiting_.push_back(name);
    }
    changed_.notify_one();
    return true;
  }

  // The one that waits longest, waited for. False: ended.
  bool take(EntryKey& name, uint64_t (*now_ms)()) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
    if (ended_) return false;
    name = waiting_.front();
    waiting_.pop_front();
    looked_at_.emplace_back(now_ms(), name);
    return true;
  }

  void end() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
  }

  size_t waiting() {
    std::lock_guard lock(mutex_);
    return waiting_.size();
  }

 private:
  std::mutex mutex_;                // guards all below
  std::condition_variable changed_;
  std::deque<EntryKey> waiting_;
  std::set<EntryKey> known_;        // waiting, or of the last minute
  std::deque<std::pair<uint64_t, EntryKey>> looked_at_;   // when; oldest first
  bool ended_ = false;
};

}  // namespace kv
