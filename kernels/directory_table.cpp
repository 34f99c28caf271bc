// See directory_table.hpp.
#include "directory_table.hpp"

#include <errno.h>
#include <sodium.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <system_error>

namespace kv::directory {
namespace {
constexpr uint32_t SEGMENTS_A_SWEEP = 64;   // at most: 0.5 ms
constexpr uint64_t BOOK_BYTES = 64;         // of a segment, beside its slots: row, and heads that name it
constexpr uint32_t SPLIT_MIN = 128;         // entries: a segment with fewer is not cut, however unlucky two of its buckets are
}  // namespace

Table::Table(uint64_t memory_bytes, const std::array<uint8_t, 16>& secret)
    : secret_(secret),
      segments_max_(uint32_t(
          std::clamp<uint64_t>((memory_bytes - std::min<uint64_t>(memory_bytes, AGENTS_BYTES)) / (SEGMENT_BYTES + BOOK_BYTES), 1, 1u << 24))),
      depth_max_(uint32_t(std::bit_width(segments_max_)) + 1),
      mapped_bytes_(size_t(segments_max_) * SEGMENT_BYTES),
      heads_(1, 0),
      agents_(AGENTS_MAX + 1) {
  void* at = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);   // taken as it is used
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory");
  memory_ = static_cast<uint8_t*>(at);
  add_segment();
  count_memory();
}

Table::~Table() { munmap(memory_, mapped_bytes_); }

Print Table::print_of(const uint8_t* owner, const uint8_t* key) const {
  uint8_t text[OWNER_BYTES + KEY_BYTES], hash[crypto_shorthash_siphashx24_BYTES];
  std::memcpy(text, owner, OWNER_BYTES);
  std::memcpy(text + OWNER_BYTES, key, KEY_BYTES);
  crypto_shorthash_siphashx24(hash, text, sizeof text, secret_.data());
  Print p;
  std::memcpy(&p.high, hash, sizeof p.high);
  std::memcpy(&p.low, hash + sizeof p.high, sizeof p.low);
  return p;
}

Table::Buckets Table::buckets(uint32_t segment, const Print& p) const {
  const uint32_t first = p.high & (BUCKETS - 1), second = (first + 1 + (p.high >> 9 & 255)) & (BUCKETS - 1);   // two different ones
  Slot* s = slots(segment);
  return {{s + first * BUCKET, s + second * BUCKET}};
}

void Table::prefetch(const Print& print) const {
  const Buckets b = buckets(segment_of(print), print);
  for (const Slot* bucket : b.of) {
    __builtin_prefetch(bucket);
    __builtin_prefetch(bucket + BUCKET / 2);
  }
}

uint64_t Table::new_expiry(uint32_t agent, uint64_t now) const { return std::max(now + TICKS, agents_[agent].floor) + 1; }

uint32_t Table::fresh(const Print& print, uint64_t now) {
  const uint32_t segment = segment_of(print);
  if (now - segments_[segment].swept > SWEPT_MAX) sweep_segment(segment, now);
  return segment;
}

Table::Slot* Table::find(const Print& print, uint32_t agent, uint64_t now) {
  const Buckets b = buckets(fresh(print, now), print);
  for (Slot* bucket : b.of)
    for (uint32_t i = 0; i < BUCKET; i++) {
      Slot& s = bucket[i];
      if (s.agent == agent && s.high == print.high && s.low == print.low) return alive(s, now) ? &s : nullptr;
    }
  return nullptr;
}

void Table::fill(uint32_t segment, Slot& slot, const Print& print, uint32_t agent, uint64_t now) {
  slot = {print.high, print.low, uint16_t(agent), uint16_t(new_expiry(agent, now))};
  segments_[segment].used++;
  agents_[agent].entries++;
  bump(stats.entries);
}

void Table::clear(uint32_t segment, Slot& slot, Counter* why) {
  agents_[slot.agent].entries--;
  segments_[segment].used--;
  slot = {};
  drop(stats.entries);
  if (why) bump(*why);
}

void Table::put(const Print& print, uint32_t agent, uint64_t now) {
  for (;;) {
    const uint32_t segment = fresh(print, now);
    const Buckets b = buckets(segment, print);
    Slot *free[2] = {}, *soonest = nullptr, *rival = nullptr;   // rival: the holder of this key that expires first
    uint32_t used[2] = {}, rivals = 0;
    for (uint32_t n = 0; n < 2; n++)
      for (uint32_t i = 0; i < BUCKET; i++) {
        Slot& s = b.of[n][i];
        if (s.agent && !alive(s, now)) clear(segment, s, &stats.expired);
        if (!s.agent) {
          free[n] = &s;
          continue;
        }
        used[n]++;
        if (s.high == print.high && s.low == print.low) {
          if (s.agent == agent) {
            s.expiry = uint16_t(new_expiry(agent, now));
            return;
          }
          rivals++;
          if (!rival || expiry_of(s, now) < expiry_of(*rival, now)) rival = &s;
        }
        if (!soonest || expiry_of(s, now) < expiry_of(*soonest, now)) soonest = &s;
      }
    Slot* to = free[used[1] < used[0]];
    if (rivals >= HOLDERS_MAX) {
      clear(segment, *rival, &stats.displaced);
      to = rival;
    } else if (!to) {
      if (split(segment, print)) continue;
      clear(segment, *soonest, &stats.evicted);
      to = soonest;
    }
    return fill(segment, *to, print, agent, now);
  }
}

bool Table::touch(const Print& print, uint32_t agent, uint64_t now) {
  Slot* s = find(print, agent, now);
  if (s) s->expiry = uint16_t(new_expiry(agent, now));
  return s;
}

bool Table::forget(const Print& print, uint32_t agent, uint64_t now) {
  Slot* s = find(print, agent, now);
  if (s) clear(segment_of(print), *s, nullptr);
  return s;
}

uint32_t Table::locate(const Print& print, uint64_t now, Held out[HOLDERS_MAX]) {
  const Buckets b = buckets(fresh(print, now), print);
  uint32_t count = 0;
  for (Slot* bucket : b.of)
    for (uint32_t i = 0; i < BUCKET; i++) {
      const Slot& s = bucket[i];
      if (!s.agent || s.high != print.high || s.low != print.low || !alive(s, now) || count == HOLDERS_MAX) continue;
      uint32_t at = count++;
      const Held held{s.agent, expiry_of(s, now)};
      for (; at && out[at - 1].expiry < held.expiry; at--) out[at] = out[at - 1];
      out[at] = held;
    }
  return count;
}

bool Table::wipe(uint32_t agent, uint64_t now) {
  uint64_t& floor = agents_[agent].floor;
  const uint64_t next = std::max(now + TICKS, floor) + 1;   // the latest that an entry of now may expire
  if (next > now + TICKS + WIPES_PER_TICK) return false;
  floor = next;
  return true;
}

void Table::sweep_segment(uint32_t segment, uint64_t now) {
  Segment& row = segments_[segment];
  // What was put since the last sweep is younger than 16 bits can tell only if that sweep was long ago: then all of it is over.
  const bool all = now - row.swept > SWEPT_MAX + 2 * TICKS;
  Slot* s = slots(segment);
  for (uint32_t i = 0; row.used && i < SLOTS; i++)
    if (s[i].agent && (all || !alive(s[i], now))) clear(segment, s[i], &stats.expired);
  row.swept = now;
}

void Table::sweep(uint64_t now) {
  owed_ += (now - std::min(swept_at_, now)) * segments_.size();
  swept_at_ = now;
  uint64_t due = owed_ / (TICKS / 2);   // all of them twice in a lifetime
  owed_ %= TICKS / 2;
  for (due = std::min<uint64_t>({due, segments_.size(), SEGMENTS_A_SWEEP}); due; due--) {
    hand_ = hand_ + 1 < segments_.size() ? hand_ + 1 : 0;
    sweep_segment(hand_, now);
  }
}

uint32_t Table::add_segment() {
  segments_.emplace_back();
  return uint32_t(segments_.size() - 1);
}

bool Table::split(uint32_t segment, const Print& print) {
  const uint8_t depth = segments_[segment].depth;
  if (segments_.size() >= segments_max_ || depth >= depth_max_ || segments_[segment].used < SPLIT_MIN) return false;
  if (depth == depth_) {
    std::vector<uint32_t> twice(heads_.size() * 2);
    for (size_t i = 0; i < twice.size(); i++) twice[i] = heads_[i / 2];
    heads_.swap(twice);
    depth_++;
  }
  const uint32_t other = add_segment();
  segments_[other] = {segments_[segment].swept, 0, uint8_t(depth + 1)};
  segments_[segment].depth = uint8_t(depth + 1);
  const size_t span = size_t(1) << (depth_ - depth), first = (depth ? print.high >> (64 - depth) : 0) * span;
  std::fill_n(heads_.begin() + ptrdiff_t(first + span / 2), span / 2, other);
  Slot *from = slots(segment), *to = slots(other);
  for (uint32_t i = 0; i < SLOTS; i++)   // a bucket's number stays
    if (from[i].agent && from[i].high >> (63 - depth) & 1) {
      to[i] = from[i];
      from[i] = {};
      segments_[segment].used--;
      segments_[other].used++;
    }
  count_memory();
  return true;
}

void Table::count_memory() {
  stats.memory_bytes.store(segments_.size() * (SEGMENT_BYTES + sizeof(Segment)) + heads_.size() * sizeof(uint32_t) +
                               AGENTS_BYTES,
                           std::memory_order_relaxed);
}

}  // namespace kv::directory
