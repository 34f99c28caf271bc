// What a node has met lately, by hash: two generations of a Bloom filter in RAM. add() and has() take 64-bit hashes of group keys.
//
// 16 bits a key and 4 probes: a "yes" is wrong about once in 200, a "no" only after a restart, or when the key's generation is gone.
// Whoever owns it says when a generation ends (rotate): the newer becomes the older, the older is forgotten. Not thread-safe.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace kv {

class Seen {
 public:
  // Memory is taken with the first key: what is never used costs nothing.
  explicit Seen(uint64_t keys_max) : words_(std::bit_ceil(std::max<uint64_t>(keys_max, 1024)) / 4), keys_max_(words_ * 4) {}

  void add(uint64_t hash) {
    if (now_.empty()) now_.assign(words_, 0);
    bool fresh = false;
    for (uint32_t i = 0; i < PROBES; i++) {
      uint64_t& word = now_[at(hash, i)];
      const uint64_t bit = bit_of(hash, i);
      fresh |= !(word & bit);
      word |= bit;
    }
    count_ += fresh;
  }
  bool has(uint64_t hash) const { return in(now_, hash) || in(before_, hash); }
  void rotate() {
    before_.swap(now_);
    std::fill(now_.begin(), now_.end(), 0);
    count_ = 0;
  }
  void clear() {
    before_.clear();
    now_.clear();
    count_ = 0;
  }
  uint64_t count() const { return count_; }       // of the newer generation
  uint64_t keys_max() const { return keys_max_; } // of one generation, for the rate of wrong answers above

 private:
  static constexpr uint32_t PROBES = 4;
  static uint64_t mixed(uint64_t hash, uint32_t i) { return (hash + i * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull; }
  size_t at(uint64_t hash, uint32_t i) const { return size_t(mixed(hash, i) >> 12) & (words_ - 1); }
  static uint64_t bit_of(uint64_t hash, uint32_t i) { return 1ull << (mixed(hash, i) >> 58); }
  bool in(const std::vector<uint64_t>& words, uint64_t hash) const {
    if (words.empty()) return false;
    for (uint32_t i = 0; i < PROBES; i++)
      if (!(words[at(hash, i)] & bit_of(hash, i))) return false;
    return true;
  }

  const uint64_t words_, keys_max_;
  std::vector<uint64_t> now_, before_;
  uint64_t count_ = 0;
};

}  // namespace kv
