// Anonymous memory that starts at a huge page: what is received into, read into, and written to by devices.
//
//   AS_USED   resident as it is touched; huge pages are wished for
//   PINNED    for a device to know, which holds all of it in any case: of the host's reserved huge pages where there are enough, else as
//             above; and kept from forked children
#pragma once
#include <linux/mman.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>

#include "common.hpp"

namespace kv {

class Pages {
 public:
  enum class Use : uint8_t { AS_USED, PINNED };
  static constexpr uint64_t HUGE_BYTES = 2 << 20;

  Pages(uint64_t bytes, Use use) : bytes_(align_up(std::max<uint64_t>(bytes, 1), HUGE_BYTES)), mapped_bytes_(bytes_) {
    if (use == Use::AS_USED || !take_reserved()) {
      mapped_bytes_ = bytes_ + HUGE_BYTES;
      void* p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) throw std::bad_alloc();
      mapped_ = static_cast<uint8_t*>(p);
      at_ = reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<uint64_t>(mapped_), HUGE_BYTES));
      madvise(at_, bytes_, MADV_HUGEPAGE);   // a wish: plain pages work too
    }
    if (use == Use::PINNED) madvise(at_, bytes_, MADV_DONTFORK);   // a forked child must not make the parent copy pages that a device writes to
  }
  ~Pages() { munmap(mapped_, mapped_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* data() const { return at_; }
  uint64_t bytes() const { return bytes_; }

 private:
  bool take_reserved() {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
    if (p == MAP_FAILED) return false;
    constexpr int POPULATE_WRITE = 23;   // MADV_POPULATE_WRITE of Linux 5.14: where a control group allows fewer, a first touch would be a SIGBUS
    if (madvise(p, bytes_, POPULATE_WRITE) && errno != EINVAL) return munmap(p, bytes_), false;
    mapped_ = at_ = static_cast<uint8_t*>(p);
    return true;
  }

  const uint64_t bytes_;
  uint64_t mapped_bytes_;
  uint8_t* mapped_ = nullptr;
  uint8_t* at_ = nullptr;
};

}  // namespace kv
