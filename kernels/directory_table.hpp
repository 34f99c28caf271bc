// Who holds which window entry: a hash table in RAM that grows without a pause and never passes its memory.
//
// An entry is (key, agent) in 16 bytes: 96 bits of a keyed hash of owner and key, the agent's number, and when it expires. Entries lie in
// segments of 64 KiB; the top bits of the hash choose the segment (extendible hashing: a full segment alone is cut in two, 10 us), other
// bits choose two of its buckets of 8. The holders of a key are entries with the same hash in the same two buckets.
//
// Time is in ticks, TICKS to a lifetime; an entry keeps the low 16 bits of its expiry. That is enough because every segment is swept at
// least every SWEPT_MAX ticks: at the latest when it is looked at. One thread at a time, but for the counters.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "common.hpp"
#include "server_stats.hpp"

namespace kv::directory {

inline constexpr uint32_t TICKS = 8192;         // of a lifetime
inline constexpr uint32_t AGENTS_MAX = 65'535;  // numbers 1 to this
inline constexpr uint32_t HOLDERS_MAX = 4;

struct Print {   // of an owner and a key
  uint64_t high;
  uint32_t low;
};

struct Held {
  uint32_t agent;
  uint64_t expiry;   // tick from which on it is no more
};

struct TableStats {
  Counter entries{0}, expired{0}, evicted{0}, displaced{0}, memory_bytes{0};   // entries: those expired and not yet swept included
};

class Table {
 public:
  // std::system_error where the address space cannot be had.
  Table(uint64_t memory_bytes, const std::array<uint8_t, 16>& secret);
  ~Table();
  Table(const Table&) = delete;

  Print print_of(const uint8_t* owner, const uint8_t* key) const;
  void prefetch(const Print& print) const;
  // Takes an entry in or renews it. A fifth holder takes the place of the one that expires first; with no memory left, any entry nearby.
  void put(const Print& print, uint32_t agent, uint64_t now);
  bool touch(const Print& print, uint32_t agent, uint64_t now);   // renews it; false: not there
  bool forget(const Print& print, uint32_t agent, uint64_t now);
  uint32_t locate(const Print& print, uint64_t now, Held out[HOLDERS_MAX]);   // by expiry, the last first
  // All entries of an agent are gone from now on. False: it asked for that too often within one tick.
  bool wipe(uint32_t agent, uint64_t now);
  void sweep(uint64_t now);   // a part of the segments, as far as the time since the last call asks for
  uint64_t entries_of(uint32_t agent) const { return agents_[agent].entries; }
  uint64_t entries_max() const { return uint64_t(segments_max_) * SLOTS; }
  uint32_t segments() const { return uint32_t(segments_.size()); }

  TableStats stats;

 private:
  struct Slot {
    uint64_t high;
    uint32_t low;
    uint16_t agent;    // 0: free
    uint16_t expiry;   // low 16 bits
  };
  static_assert(sizeof(Slot) == 16);
  static constexpr uint32_t BUCKET = 8, BUCKETS = 512, SLOTS = BUCKET * BUCKETS;
  static constexpr size_t SEGMENT_BYTES = SLOTS * sizeof(Slot);
  static constexpr uint64_t SWEPT_MAX = 2 * TICKS;
  static constexpr uint64_t WIPES_PER_TICK = 64;

  struct Segment {
    uint64_t swept = 0;
    uint32_t used = 0;
    uint8_t depth = 0;   // leading bits of the hash that all its entries share
  };
  struct Agent {
    uint64_t floor = 0;   // entries that expire no later were wiped
    uint64_t entries = 0;
  };
  static constexpr uint64_t AGENTS_BYTES = (AGENTS_MAX + 1) * sizeof(Agent);   // 1 MiB, there from the start, and in the cap
  struct Buckets {
    Slot* of[2];
  };

  uint32_t segment_of(const Print& p) const { return heads_[depth_ ? p.high >> (64 - depth_) : 0]; }
  Slot* slots(uint32_t segment) const { return reinterpret_cast<Slot*>(memory_ + size_t(segment) * SEGMENT_BYTES); }
  Buckets buckets(uint32_t segment, const Print& p) const;
  uint64_t expiry_of(const Slot& s, uint64_t now) const { return now + int64_t(int16_t(uint16_t(s.expiry - uint16_t(now)))); }
  bool alive(const Slot& s, uint64_t now) const {
    const uint64_t expiry = expiry_of(s, now);
    return expiry > now && expiry > agents_[s.agent].floor;
  }
  uint64_t new_expiry(uint32_t agent, uint64_t now) const;
  uint32_t fresh(const Print& print, uint64_t now);   // its segment, swept lately enough
  Slot* find(const Print& print, uint32_t agent, uint64_t now);
  void fill(uint32_t segment, Slot& slot, const Print& print, uint32_t agent, uint64_t now);
  void clear(uint32_t segment, Slot& slot, Counter* why);
  void sweep_segment(uint32_t segment, uint64_t now);
  uint32_t add_segment();
  bool split(uint32_t segment, const Print& print);
  void count_memory();

  const std::array<uint8_t, 16> secret_;
  uint32_t segments_max_;
  uint32_t depth_max_;
  size_t mapped_bytes_;
  uint8_t* memory_ = nullptr;
  uint32_t depth_ = 0;
  std::vector<uint32_t> heads_;      // leading depth_ bits of the hash: segment
  std::vector<Segment> segments_;
  std::vector<Agent> agents_;        // by number
  uint32_t hand_ = 0;                // next segment to sweep
  uint64_t swept_at_ = 0;
  uint64_t owed_ = 0;                // of the sweep, in segments times ticks
};

inline void bump(Counter& c, uint64_t n = 1) { c.store(c.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }   // one writer
inline void drop(Counter& c, uint64_t n = 1) { c.store(c.load(std::memory_order_relaxed) - n, std::memory_order_relaxed); }

}  // namespace kv::directory
