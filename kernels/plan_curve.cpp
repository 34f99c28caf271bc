// Miss-ratio curves by one pass of reuse distances, and the sampling that makes them cheap. Plain reference: plan_reference.py.
//
// A block's depth is the number of distinct blocks touched since its last touch, itself included: LRU of c blocks holds it if depth <= c.
// Touch marks lie in a bitmap over time, a Fenwick tree over the bitmap's words counts them: 234,597 live blocks are 29 KB of tree, so
// counting stays in the fastest cache. Times are renumbered when the map is full, each time paid for by as many touches as blocks live.
#include <immintrin.h>

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

// For each set of eight lanes the order that brings its lanes to the front: which blocks are kept is random, a branch would guess wrong.
struct Front {
  alignas(32) uint32_t lanes[256][8] = {};
  constexpr Front() {
    for (unsigned set = 0; set < 256; set++)
      for (unsigned lane = 0, to = 0; lane < 8; lane++)
        if (set >> lane & 1) lanes[set][to++] = lane;
  }
};
constexpr Front FRONT;

// Keeps the accesses of blocks whose keep[id] is not 0, with new ids keep[id] - 1; a request whose last block goes ends in a whole one.
size_t sample_accesses(U32 ids, U64 ends, U32 last_tokens, U32 keep, uint32_t block_tokens, U32Out out, U64Out out_ends, U32Out out_last) {
  require_ends(ids, ends, uint32_t(keep.shape(0)));
  const size_t requests = ends.shape(0);
  if (last_tokens.shape(0) != requests || out_ends.shape(0) != requests || out_last.shape(0) != requests || out.shape(0) != ids.shape(0) + 8)
    throw std::invalid_argument("one place for each request and access, and eight more accesses");
  nb::gil_scoped_release release;
  std::vector<uint8_t> bits(keep.shape(0) / 8 + 2);  // a bit a block: stays in the fastest cache
  for (size_t id = 0; id < keep.shape(0); id++) bits[id / 8] |= uint8_t((keep.data()[id] != 0) << (id % 8));
  const __m256i following = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  size_t at = 0, to = 0;
  for (size_t r = 0; r < requests; r++) {
    const size_t end = ends.data()[r];
    require_ids(ids.data() + at, end - at, uint32_t(keep.shape(0)));  // a prompt at a time: it is read once from memory, not twice
    for (; at + 8 <= end; at += 8) {
      const uint32_t* eight = ids.data() + at;
      const __m256i id = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(eight));
      const __m256i run = _mm256_add_epi32(_mm256_set1_epi32(int(*eight)), following);
      unsigned found = 0;
      if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(id, run)) == -1)  // new blocks of a prompt are numbered as they come: nearly always
        found = (bits[*eight / 8] | unsigned(bits[*eight / 8 + 1]) << 8) >> (*eight % 8) & 255;
      else
        for (unsigned lane = 0; lane < 8; lane++) found |= (bits[eight[lane] / 8] >> (eight[lane] % 8) & 1u) << lane;
      const __m256i front = _mm256_load_si256(reinterpret_cast<const __m256i*>(FRONT.lanes[found]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.data() + to), _mm256_permutevar8x32_epi32(id, front));
      to += size_t(std::popcount(found));
    }
    for (; at < end; at++)
      if (keep.data()[ids.data()[at]]) out.data()[to++] = ids.data()[at];
    out_ends.data()[r] = to;
    const bool whole = end == (r ? ends.data()[r - 1] : 0) || !keep.data()[ids.data()[end - 1]];
    out_last.data()[r] = whole ? block_tokens : last_tokens.data()[r];
  }
  for (size_t i = 0; i < to; i++) out.data()[i] = keep.data()[out.data()[i]] - 1;
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
