// Miss-ratio curves by one pass of reuse distances, and the sampling that makes them cheap. Plain reference: plan_reference.py.
//
// A block's depth is the number of distinct blocks touched since its last touch, itself included: LRU of c blocks holds it if depth <= c.
// Touch marks lie in a bitmap over time, a Fenwick tree over the bitmap's words counts them: 234,597 live blocks are 29 KB of tree, so
// counting stays in the fastest cache. Times are renumbered when the map is full, each time paid for by as many touches as blocks live.
#include <bit>
#include <stdexcept>
#include <vector>

#include "plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::plan {
namespace {

class Depths {
 public:
  explicit Depths(uint32_t unique) : last_(unique, NONE), slots_(std::max<size_t>(2 * size_t(unique), 4096)) {
    owner_.resize(slots_);
    marks_.assign(slots_ / 64 + 1, 0);
    tree_.assign(marks_.size() + 1, 0);
  }

  // Depth of this touch, NONE where it is the first.
  uint32_t touch(uint32_t id) {
    if (now_ == slots_) renumber();
    uint32_t depth = NONE;
    if (const uint32_t then = last_[id]; then != NONE) {
      depth = live_ - before(then);
      clear(then);
      live_--;
    }
    last_[id] = now_;
    owner_[now_] = id;
    set(now_++);
    live_++;
    return depth;
  }

 private:
  uint32_t before(uint32_t at) const {  // marks at earlier times than `at`
    uint32_t sum = uint32_t(std::popcount(marks_[at / 64] & ((1ull << (at % 64)) - 1)));
    for (uint32_t i = at / 64; i; i &= i - 1) sum += tree_[i];
    return sum;
  }
  void add(uint32_t word, uint32_t by) {
    for (uint32_t i = word + 1; i < tree_.size(); i += i & -i) tree_[i] += by;
  }
  void set(uint32_t at) {
    marks_[at / 64] |= 1ull << (at % 64);
    add(at / 64, 1);
  }
  void clear(uint32_t at) {
    marks_[at / 64] &= ~(1ull << (at % 64));
    add(at / 64, uint32_t(-1));
  }
  void renumber() {
    uint32_t to = 0;
    for (size_t word = 0; word < marks_.size(); word++)
      for (uint64_t bits = marks_[word]; bits; bits &= bits - 1) {
        const uint32_t id = owner_[word * 64 + size_t(std::countr_zero(bits))];
        owner_[to] = id;
        last_[id] = to++;
      }
    std::fill(marks_.begin(), marks_.end(), 0);
    std::fill(tree_.begin(), tree_.end(), 0);
    for (uint32_t at = 0; at < to; at++) marks_[at / 64] |= 1ull << (at % 64);
    for (uint32_t word = 0; word <= to / 64; word++) add(word, uint32_t(std::popcount(marks_[word])));
    now_ = to;
  }

  std::vector<uint32_t> last_, owner_, tree_;
  std::vector<uint64_t> marks_;
  size_t slots_;
  uint32_t now_ = 0, live_ = 0;
};

// blocks[d] and tokens[d] += each access of depth d; firsts go to index 0.
void reuse_histogram(U32 ids, U64 ends, U32 last_tokens, uint32_t unique, uint32_t block_tokens, U64Out blocks, U64Out tokens) {
  require_trace(ids, ends, unique);
  if (last_tokens.shape(0) != ends.shape(0)) throw std::invalid_argument("one last_tokens for each request");
  if (blocks.shape(0) != size_t(unique) + 1 || tokens.shape(0) != size_t(unique) + 1)
    throw std::invalid_argument("histograms have unique + 1 places");
  nb::gil_scoped_release release;
  Depths depths(unique);
  const uint32_t* id = ids.data();
  size_t at = 0;
  for (size_t r = 0; r < ends.shape(0); r++)
    for (const size_t end = ends.data()[r]; at < end; at++) {
      const uint32_t found = depths.touch(id[at]), depth = found == NONE ? 0 : found;
      blocks.data()[depth]++;
      tokens.data()[depth] += at + 1 == end ? last_tokens.data()[r] : block_tokens;
    }
}

// For each access its depth, and the request that touched the block before; NONE for firsts.
void reuse_depths(U32 ids, U64 ends, uint32_t unique, U32Out depth, U32Out previous) {
  require_trace(ids, ends, unique);
  if (depth.shape(0) != ids.shape(0) || previous.shape(0) != ids.shape(0)) throw std::invalid_argument("one place for each access");
  nb::gil_scoped_release release;
  Depths depths(unique);
  std::vector<uint32_t> seen(unique, NONE);
  size_t at = 0;
  for (size_t r = 0; r < ends.shape(0); r++)
    for (const size_t end = ends.data()[r]; at < end; at++) {
      const uint32_t id = ids.data()[at];
      depth.data()[at] = depths.touch(id);
      previous.data()[at] = seen[id];
      seen[id] = uint32_t(r);
    }
}

// Keeps the accesses of blocks whose keep[id] is not 0, with new ids keep[id] - 1; a request whose last block goes ends in a whole one.
size_t sample_accesses(U32 ids, U64 ends, U32 last_tokens, U32 keep, uint32_t block_tokens, U32Out out, U64Out out_ends, U32Out out_last) {
  require_trace(ids, ends, uint32_t(keep.shape(0)));
  const size_t requests = ends.shape(0);
  if (last_tokens.shape(0) != requests || out_ends.shape(0) != requests || out_last.shape(0) != requests || out.shape(0) != ids.shape(0) + 1)
    throw std::invalid_argument("one place for each request and access, and one more access");
  nb::gil_scoped_release release;
  size_t at = 0, to = 0;
  for (size_t r = 0; r < requests; r++) {
    const size_t end = ends.data()[r];
    uint32_t kept = 0;
    for (; at < end; at++) {  // without a branch: which blocks are kept is random
      kept = keep.data()[ids.data()[at]];
      out.data()[to] = kept - 1;
      to += kept != 0;
    }
    out_ends.data()[r] = to;
    out_last.data()[r] = kept ? last_tokens.data()[r] : block_tokens;
  }
  return to;
}

}  // namespace
}  // namespace kv::plan

void bind_plan_curve(nb::module_& m) {
  using namespace kv::plan;
  m.def("plan_reuse_histogram", &reuse_histogram, "ids"_a.noconvert(), "ends"_a.noconvert(), "last_tokens"_a.noconvert(), "unique"_a,
        "block_tokens"_a, "blocks"_a.noconvert(), "tokens"_a.noconvert());
  m.def("plan_reuse_depths", &reuse_depths, "ids"_a.noconvert(), "ends"_a.noconvert(), "unique"_a, "depth"_a.noconvert(),
        "previous"_a.noconvert());
  m.def("plan_sample_accesses", &sample_accesses, "ids"_a.noconvert(), "ends"_a.noconvert(), "last_tokens"_a.noconvert(),
        "keep"_a.noconvert(), "block_tokens"_a, "out"_a.noconvert(), "out_ends"_a.noconvert(), "out_last"_a.noconvert());
}
