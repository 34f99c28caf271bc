// Block caches under prefix semantics: what `kvstore plan --policy` compares. Plain reference: plan_reference.py.
//
// A request is looked up whole, then stored. Its hits are the leading blocks that are there. What admission lets in is a prefix, too: behind
// a block that was refused nothing is written. Order `front` touches and writes front to back, as the classic simulators do; `tail` writes
// the later parts first and leaves the front the most recent, as our nodes do, so that a prompt loses its end before its beginning.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan.hpp"

#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::plan {
namespace {

// A queue of ids threaded through arrays that all queues of one cache share; head is the newest.
struct Links {
  std::vector<uint32_t> older, newer;
  explicit Links(uint32_t unique) : older(unique, NONE), newer(unique, NONE) {}
  Links(const Links&) = delete;  // queues point at it
};

struct Queue {
  Links& links;
  uint32_t head = NONE, tail = NONE;
  size_t size = 0;

  void push(uint32_t id) {
    links.older[id] = head;
    links.newer[id] = NONE;
    (head == NONE ? tail : links.newer[head]) = id;
    head = id;
    size++;
  }
  void remove(uint32_t id) {
    const uint32_t older = links.older[id], newer = links.newer[id];
    (newer == NONE ? head : links.older[newer]) = older;
    (older == NONE ? tail : links.newer[older]) = newer;
    size--;
  }
};

struct Lru {
  static constexpr bool ORDERED_BY_TOUCH = true;
  size_t capacity;
  std::vector<uint8_t> here;
  Links links;
  Queue queue{links};
  Lru(uint32_t unique, size_t c) : capacity(c), here(unique), links(unique) {}

  bool has(uint32_t id) const { return here[id]; }
  void touch(uint32_t id) {
    queue.remove(id);
    queue.push(id);
  }
  void insert(uint32_t id) {
    if (queue.size == capacity) {
      const uint32_t out = queue.tail;
      queue.remove(out);
      here[out] = 0;
    }
    queue.push(id);
    here[id] = 1;
  }
};

struct Sieve {
  static constexpr bool ORDERED_BY_TOUCH = false;
  size_t capacity;
  std::vector<uint8_t> here, visited;
  Links links;
  Queue queue{links};
  uint32_t hand = NONE;
  Sieve(uint32_t unique, size_t c) : capacity(c), here(unique), visited(unique), links(unique) {}

  bool has(uint32_t id) const { return here[id]; }
  void touch(uint32_t id) { visited[id] = 1; }
  void insert(uint32_t id) {
    if (queue.size == capacity) {
      uint32_t at = hand == NONE ? queue.tail : hand;
      while (visited[at]) {
        visited[at] = 0;
        at = links.newer[at] == NONE ? queue.tail : links.newer[at];
      }
      hand = links.newer[at];
      queue.remove(at);
      here[at] = 0;
    }
    queue.push(id);
    here[id] = 1;
    visited[id] = 0;
  }
};

// Small queue of a tenth, main queue, and a ghost of as many ids as main has room for. Used twice in small: to main; once in main: again.
struct S3Fifo {
  static constexpr bool ORDERED_BY_TOUCH = false;
  static constexpr uint8_t FREQUENCY_MAX = 3;
  size_t capacity, small_capacity, ghost_capacity;
  std::vector<uint8_t> where, frequency;  // where: 0 nowhere, 1 small, 2 main
  std::vector<uint64_t> ghost_at;         // 1 + number of the eviction from small that left it there; 0: not in the ghost
  uint64_t ghosts = 0;
  Links links;
  Queue small{links}, main{links};
  S3Fifo(uint32_t unique, size_t c)
      : capacity(c), small_capacity(std::max<size_t>(1, c / 10)), ghost_capacity(c - small_capacity), where(unique), frequency(unique),
        ghost_at(unique), links(unique) {}

  bool has(uint32_t id) const { return where[id]; }
  void touch(uint32_t id) { frequency[id] = std::min<uint8_t>(FREQUENCY_MAX, frequency[id] + 1); }
  void insert(uint32_t id) {
    while (small.size + main.size >= capacity) evict();
    const bool remembered = ghost_at[id] && ghosts - ghost_at[id] < ghost_capacity;
    ghost_at[id] = 0;
    frequency[id] = 0;
    where[id] = remembered ? 2 : 1;
    (remembered ? main : small).push(id);
  }
  void evict() {
    if (small.size >= small_capacity || !main.size)
      while (small.size) {
        const uint32_t id = small.tail;
        small.remove(id);
        if (frequency[id] < 2 || small_capacity == capacity) {
          where[id] = 0;
          ghost_at[id] = ++ghosts;
          return;
        }
        frequency[id] = 0;
        where[id] = 2;
        main.push(id);
      }
    for (;;) {
      const uint32_t id = main.tail;
      main.remove(id);
      if (!frequency[id]) {
        where[id] = 0;
        return;
      }
      frequency[id]--;
      main.push(id);
    }
  }
};

// Admission: asked front to back for each block that is not there; `refused` hears of every block that is not written.
struct Always {
  void begin(uint64_t) {}
  bool admits(uint32_t) { return true; }
  void refused(uint32_t) {}
};

// Written at the second request: the first one leaves a note among the last `memory` ones.
struct SecondTouch {
  size_t memory;
  std::vector<uint64_t> noted_at;  // 1 + number of the note; 0: none
  uint64_t notes = 0;
  SecondTouch(uint32_t unique, double m) : memory(size_t(m)), noted_at(unique) {}
  bool remembers(uint32_t id) const { return noted_at[id] && notes - noted_at[id] < memory; }
  void begin(uint64_t) {}
  bool admits(uint32_t id) { return remembers(id); }
  void refused(uint32_t id) {
    if (!remembers(id)) noted_at[id] = ++notes;
  }
};

// So many blocks a day, saved up for an hour at most.
struct WriteBudget {
  double per_ms, most, left;
  uint64_t then = 0;
  WriteBudget(uint32_t, double blocks_a_day) : per_ms(blocks_a_day / 86'400'000), most(std::max(1.0, blocks_a_day / 24)), left(most) {}
  void begin(uint64_t now) {
    left = std::min(most, left + per_ms * double(now - std::min(now, then)));
    then = now;
  }
  bool admits(uint32_t) {
    if (left < 1) return false;
    left -= 1;
    return true;
  }
  void refused(uint32_t) {}
};

struct Run {
  U32 ids;
  U64 ends, times_ms;
  bool tail_first;
  U32Out hits, written, held;
};

template <typename Cache, typename Admission>
void play(const Run& run, Cache cache, Admission admission) {
  size_t begin = 0;
  for (size_t r = 0; r < run.ends.shape(0); r++) {
    const uint32_t* id = run.ids.data() + begin;
    const size_t count = run.ends.data()[r] - begin;
    begin = run.ends.data()[r];
    size_t hits = 0, admitted = 0;
    while (hits < count && cache.has(id[hits])) hits++;
    admission.begin(run.times_ms.data()[r]);
    for (admitted = hits; admitted < count; admitted++)
      if (!cache.has(id[admitted]) && !admission.admits(id[admitted])) break;
    for (size_t j = admitted; j < count; j++)
      if (!cache.has(id[j])) admission.refused(id[j]);

    uint32_t written = 0, held = 0;
    const auto access = [&](size_t j) {
      if (cache.has(id[j])) {
        cache.touch(id[j]);
        held++;
      } else {
        cache.insert(id[j]);
        written++;
      }
    };
    if (run.tail_first) {
      for (size_t j = hits; j-- > 0;) access(j);
      for (size_t j = admitted; j-- > hits;) access(j);
      if (Cache::ORDERED_BY_TOUCH)  // the front is to be the most recent
        for (size_t j = hits; j-- > 0;)
          if (cache.has(id[j])) cache.touch(id[j]);
    } else {
      for (size_t j = 0; j < admitted; j++) access(j);
    }
    run.hits.data()[r] = uint32_t(hits);
    run.written.data()[r] = written;
    run.held.data()[r] = held;
  }
}

template <typename Cache>
void play_admitted(const Run& run, uint32_t unique, size_t capacity, const std::string& admission, double limit) {
  if (admission == "always") play(run, Cache(unique, capacity), Always());
  else if (admission == "second-touch") play(run, Cache(unique, capacity), SecondTouch(unique, limit));
  else play(run, Cache(unique, capacity), WriteBudget(unique, limit));
}

void simulate(const std::string& eviction, const std::string& admission, U32 ids, U64 ends, U64 times_ms, uint32_t unique, uint64_t capacity,
              bool tail_first, double limit, U32Out hits, U32Out written, U32Out held) {
  require_trace(ids, ends, unique);
  const size_t requests = ends.shape(0);
  if (times_ms.shape(0) != requests || hits.shape(0) != requests || written.shape(0) != requests || held.shape(0) != requests)
    throw std::invalid_argument("one place for each request");
  if (!capacity) throw std::invalid_argument("a cache has room for one block at least");
  if (eviction != "lru" && eviction != "sieve" && eviction != "s3fifo") throw std::invalid_argument("no eviction \"" + eviction + "\"");
  if (admission != "always" && admission != "second-touch" && admission != "write-budget")
    throw std::invalid_argument("no admission \"" + admission + "\"");
  if (!(limit >= 0)) throw std::invalid_argument("an admission's limit is 0 or more");
  nb::gil_scoped_release release;
  const Run run{ids, ends, times_ms, tail_first, hits, written, held};
  if (eviction == "lru") play_admitted<Lru>(run, unique, capacity, admission, limit);
  else if (eviction == "sieve") play_admitted<Sieve>(run, unique, capacity, admission, limit);
  else play_admitted<S3Fifo>(run, unique, capacity, admission, limit);
}

}  // namespace
}  // namespace kv::plan

void bind_plan_policy(nb::module_& m) {
  using namespace kv::plan;
  m.def("plan_simulate", &simulate, "eviction"_a, "admission"_a, "ids"_a.noconvert(), "ends"_a.noconvert(), "times_ms"_a.noconvert(), "unique"_a,
        "capacity"_a, "tail_first"_a, "limit"_a, "hits"_a.noconvert(), "written"_a.noconvert(), "held"_a.noconvert());
}
