// Bounded, page-aligned buffers on huge pages: what a WRITE is received into and what a direct read lands in.
//
// One address range reserved at start; unless a device is to know it, memory becomes resident only as it is used, lowest addresses first,
// so a quiet daemon stays small. (tried: O_DIRECT from 4 KiB pages is 30% slower than from huge ones.) take() never waits: an empty buffer means "limit reached".
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "pages.hpp"

namespace kv {

class Arena {
 public:
  static constexpr uint64_t GRAIN_BYTES = 64 << 10, KEPT_BYTES = 8 << 20;

  class Buffer {
   public:
    Buffer() = default;
    Buffer(Arena* arena, uint64_t at, uint64_t bytes) : arena_(arena), at_(at), bytes_(bytes) {}
    Buffer(Buffer&& other) noexcept : arena_(std::exchange(other.arena_, nullptr)), at_(other.at_), bytes_(other.bytes_) {}
    Buffer& operator=(Buffer&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(at_, other.at_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Buffer() {
      if (arena_) arena_->give_back(at_, bytes_);
    }
    explicit operator bool() const { return arena_; }
    uint8_t* data() const { return arena_->base() + at_; }
    uint64_t bytes() const { return arena_ ? bytes_ : 0; }

   private:
    Arena* arena_ = nullptr;
    uint64_t at_ = 0, bytes_ = 0;
  };

  explicit Arena(uint64_t bytes, Pages::Use use = Pages::Use::AS_USED) : pages_(bytes, use) { free_[0] = pages_.bytes(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Buffer take(uint64_t bytes) {
    bytes = align_up(bytes ? bytes : 1, GRAIN_BYTES);
    std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      const uint64_t at = it->first, left = it->second - bytes;
      free_.erase(it);
      if (left) free_[at + bytes] = left;
      used_ += bytes;
      touched_ = touched_ > at + bytes ? touched_ : at + bytes;
      return Buffer(this, at, bytes);
    }
    return Buffer();
  }
  // Gives memory of quiet times back to the system; called now and then by whoever has a timer. Never where a device knows the pages.
  void trim() {
    std::lock_guard lock(mutex_);
    if (used_ || touched_ <= KEPT_BYTES) return;
    madvise(base() + KEPT_BYTES, touched_ - KEPT_BYTES, MADV_DONTNEED);
    touched_ = KEPT_BYTES;
  }
  uint64_t used_bytes() const {
    std::lock_guard lock(mutex_);
    return used_;
  }
  uint64_t capacity_bytes() const { return pages_.bytes(); }
  uint8_t* base() const { return pages_.data(); }

 private:
  void give_back(uint64_t at, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    used_ -= bytes;
    auto after = free_.lower_bound(at);
    if (after != free_.end() && after->first == at + bytes) {
      bytes += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;   // offset -> bytes; neighbours merged
  uint64_t used_ = 0, touched_ = 0;
  const Pages pages_;
};

}  // namespace kv
