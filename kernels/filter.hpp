// A cuckoo filter of 12-bit fingerprints: "is anything stored under this owner and extent key?", answered from RAM.
//
// "no" is always true; "yes" is wrong for about 1 in 500 absent keys (2 buckets x 4 slots / 2^12). Deletable: each key is inserted
// once (by the first of its entries) and erased once (by the last). Not thread-safe: the caller locks.
// Buckets: 4 slots x 12 bits = 6 bytes; n buckets, any n: the partner of bucket i for fingerprint f is (h(f) - i) mod n, its own inverse.
// Saved at a clean stop (filter_file.hpp): hash, buckets and slots are then a format, docs/FORMAT.md.
// An insert that finds no room keeps the homeless fingerprint in a stash; past 8 of them the filter is saturated and says only "maybe".
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "common.hpp"

namespace kv {

class CuckooFilter {
 public:
  static constexpr double LOAD_MAX = 0.92;   // start growing here; inserts begin to fail near 0.97

  static uint64_t hash(const uint8_t* owner_and_key) { return XXH3_64bits(owner_and_key, OWNER_BYTES + KEY_BYTES); }

  using Stash = std::vector<std::pair<uint32_t, uint16_t>>;   // (bucket, fingerprint)
  static constexpr size_t BUCKET_BYTES = 6;

  explicit CuckooFilter(uint64_t keys)
      : buckets_(uint32_t(std::max<uint64_t>(keys, 1024) / 4 + 1)), bytes_(size_t(buckets_) * BUCKET_BYTES + 8) {}
  // One that was saved: `bytes` of `buckets` buckets, and 8 spare ones.
  CuckooFilter(uint32_t buckets, uint64_t count, std::vector<uint8_t> bytes, Stash stash)
      : buckets_(buckets), count_(count), bytes_(std::move(bytes)), stash_(std::move(stash)) {}

  void prefetch(uint64_t h) const {
    const uint32_t i = first(h);
    __builtin_prefetch(&bytes_[size_t(i) * BUCKET_BYTES]);
    __builtin_prefetch(&bytes_[size_t(partner(i, fingerprint(h))) * BUCKET_BYTES]);
  }

  bool maybe(uint64_t h) const {
    const uint16_t f = fingerprint(h);
    const uint32_t i = first(h), j = partner(i, f);
    if (has(i, f) || has(j, f) || saturated()) return true;
    for (const auto& [bucket, print] : stash_)
      if (print == f && (bucket == i || bucket == j)) return true;
    return false;
  }

  void insert(uint64_t h) {
    count_++;
    uint16_t f = fingerprint(h);
    uint32_t i = first(h);
    if (place(i, f) || place(partner(i, f), f)) return;
    for (int kick = 0; kick < 256; kick++) {
      rng_ = rng_ * 6364136223846793005ull + 1442695040888963407ull;
      const int slot = int(rng_ >> 62);
      const uint16_t out = get(i, slot);
      set(i, slot, f);
      f = out;
      i = partner(i, f);
      if (place(i, f)) return;
    }
    stash_.emplace_back(i, f);
  }

  // Only for a key that was inserted.
  void erase(uint64_t h) {
    const uint16_t f = fingerprint(h);
    const uint32_t i = first(h), j = partner(i, f);
    if (count_) count_--;
    for (auto it = stash_.begin(); it != stash_.end(); ++it)
      if (it->second == f && (it->first == i || it->first == j)) return void(stash_.erase(it));
    for (uint32_t b : {i, j})
      for (int slot = 0; slot < 4; slot++)
        if (get(b, slot) == f) return set(b, slot, 0);
  }

  bool saturated() const { return stash_.size() > 8; }
  bool full() const { return double(count_) > LOAD_MAX * 4.0 * buckets_ || !stash_.empty(); }
  uint64_t count() const { return count_; }
  uint64_t bytes() const { return bytes_.size(); }
  uint32_t buckets() const { return buckets_; }
  const uint8_t* table() const { return bytes_.data(); }
  const Stash& stash() const { return stash_; }
  uint64_t slots_used() const {   // of a sound one: count()
    uint64_t used = stash_.size();
    for (uint32_t b = 0; b < buckets_; b++)
      for (int slot = 0; slot < 4; slot++) used += get(b, slot) != 0;
    return used;
  }

 private:
  static uint16_t fingerprint(uint64_t h) { const uint16_t f = h & 0xfff; return f ? f : 1; }
  uint32_t first(uint64_t h) const { return uint32_t(((h >> 32) * buckets_) >> 32); }
  uint32_t partner(uint32_t i, uint16_t f) const {
    const uint32_t h = uint32_t((uint64_t(uint32_t(f * 0x9e3779b1u)) * buckets_) >> 32);
    return h >= i ? h - i : h + buckets_ - i;
  }
  uint64_t load(uint32_t bucket) const { uint64_t w; std::memcpy(&w, &bytes_[size_t(bucket) * BUCKET_BYTES], 8); return w; }
  bool has(uint32_t bucket, uint16_t f) const {
    const uint64_t w = load(bucket);
    return (w & 0xfff) == f || ((w >> 12) & 0xfff) == f || ((w >> 24) & 0xfff) == f || ((w >> 36) & 0xfff) == f;
  }
  uint16_t get(uint32_t bucket, int slot) const { return (load(bucket) >> (12 * slot)) & 0xfff; }
  void set(uint32_t bucket, int slot, uint16_t f) {
    const uint64_t w = (load(bucket) & ~(0xfffull << (12 * slot))) | (uint64_t(f) << (12 * slot));
    std::memcpy(&bytes_[size_t(bucket) * BUCKET_BYTES], &w, 8);
  }
  bool place(uint32_t bucket, uint16_t f) {
    for (int slot = 0; slot < 4; slot++)
      if (!get(bucket, slot)) return set(bucket, slot, f), true;
    return false;
  }

  uint32_t buckets_;
  uint64_t count_ = 0, rng_ = 0x2545f4914f6cdd1dull;
  std::vector<uint8_t> bytes_;   // 8 spare bytes: a bucket is read and written as one word
  Stash stash_;
};

}  // namespace kv
