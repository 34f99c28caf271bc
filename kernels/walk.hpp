// Interval cover: which extents a lookup reads (kvstore/client/lookup.py). Plain reference: kvstore/kernels/walk_reference.py.
//
// Chains cross writers, extents overlap, and any block range inside an extent can be read. So the longest prefix is found by reach: of all
// extents that start at or before it, the one whose match ends furthest moves it on. (Taking the longest extent that starts exactly where
// the last one ended is wrong: one that starts a little earlier may reach further.)
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace kv {

struct Candidate { uint32_t start, end, row; };      // one writing whose blocks [start, end) equal the caller's; `row` is the caller's name for it
struct Piece { uint32_t start, end, first, row; };   // blocks [start, end) are read from the writing `row`, which begins at block `first`
static_assert(sizeof(Piece) == 16);

// The longest prefix that the candidates cover: its pieces in order, as few as possible.
inline std::vector<Piece> cover(std::vector<Candidate> candidates) {
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return std::tie(a.start, a.end, a.row) < std::tie(b.start, b.end, b.row); });
  std::vector<Piece> pieces;
  Candidate best{};
  uint32_t reach = 0;
  size_t at = 0;
  for (;;) {
    for (; at < candidates.size() && candidates[at].start <= reach; at++)
      if (candidates[at].end >= best.end) best = candidates[at];   // among equals the latest start: fewer blocks of it go unread
    if (best.end <= reach) return pieces;
    pieces.push_back({reach, best.end, best.start, best.row});
    reach = best.end;
  }
}

}  // namespace kv
