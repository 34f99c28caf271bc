// What a daemon counts: relaxed atomics, written by its threads, read by Python now and then (Server.stats()).
#pragma once
#include <atomic>
#include <chrono>

#include "common.hpp"

namespace kv {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum class Op : uint8_t { HELLO, DISCOVER, PROMISE, WITHDRAW, WHY, ADMIT, SUSPECT, READ, WRITE, REGISTER, LOCATE, TOUCH, FORGET, REPORT, STATUS, COUNT };
inline constexpr const char* OP_NAMES[] = {"hello", "discover", "promise", "withdraw", "why",    "admit", "suspect", "read",
                                           "write", "register", "locate",  "touch",    "forget", "report", "status"};
inline constexpr uint32_t OPS = uint32_t(Op::COUNT);
static_assert(sizeof OP_NAMES / sizeof *OP_NAMES == OPS);
inline constexpr uint32_t STATUSES = 64;   // Status numbers are below this

using Counter = std::atomic<uint64_t>;
inline void add(Counter& c, uint64_t n = 1) { c.fetch_add(n, std::memory_order_relaxed); }
inline void sub(Counter& c, uint64_t n = 1) { c.fetch_sub(n, std::memory_order_relaxed); }

struct Histogram {
  static constexpr uint64_t BOUNDS_US[] = {50,    100,    250,    500,     1'000,   2'500,     5'000,     10'000,
                                           25'000, 50'000, 100'000, 250'000, 500'000, 1'000'000, 2'500'000, 10'000'000};
  static constexpr uint32_t BOUNDS = sizeof BOUNDS_US / sizeof *BOUNDS_US;
  Counter counts[BOUNDS + 1] = {};   // not cumulative; the last: beyond every bound
  Counter sum_ns{0};
  void observe(int64_t ns) {
    uint32_t i = 0;
    while (i < BOUNDS && uint64_t(ns) > BOUNDS_US[i] * 1000) i++;
    add(counts[i]);
    add(sum_ns, uint64_t(ns));
  }
};

struct ServerStats {
  Counter requests[OPS][STATUSES] = {};   // answered requests; of READ: whole requests
  Histogram seconds[OPS];                 // request received (its first byte, where it has a long body) to answer handed to the kernel
  Counter queued[OPS] = {};               // gauge: accepted and not yet answered
  Counter read_items[STATUSES] = {};
  Counter bytes_in{0}, bytes_out{0};
  Counter connections{0};                 // gauge
  Counter connections_opened{0}, connections_refused{0}, connections_idle_closed{0}, connections_cut{0};
  Counter frames_malformed{0}, faults{0};   // faults: exceptions caught; each ended one request or connection
  Counter read_head_bytes{0};             // gauge: heads and checks held for reads
  Histogram disk_read_seconds;            // of the direct engine: at the disk
  Counter reads_direct{0}, reads_direct_bytes{0}, reads_cached{0}, reads_fell_back{0};
  Counter verbs_opened{0}, verbs_refused{0}, verbs_failed{0}, verbs_bytes{0};   // RDMA: set up, not set up, broken; written and acknowledged
  Counter epoch_seen{0};                  // newest epoch any peer named

  void answered(Op op, Status status, int64_t born_ns) {
    add(requests[uint32_t(op)][uint32_t(status) % STATUSES]);
    seconds[uint32_t(op)].observe(now_ns() - born_ns);
  }
  void saw_epoch(uint64_t epoch) {
    uint64_t seen = epoch_seen.load(std::memory_order_relaxed);
    while (epoch > seen && !epoch_seen.compare_exchange_weak(seen, epoch, std::memory_order_relaxed)) {
    }
  }
};

}  // namespace kv
