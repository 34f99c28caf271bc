// What the kernels of `kvstore plan` share: a trace as flat arrays.
//
//   ids   block ids of all prompts back to back, dense: 0 .. unique - 1
//   ends  for each request where its ids end
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "bind.hpp"

namespace kv::plan {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U32 = Array<const uint32_t>;
using U64 = Array<const uint64_t>;
using U32Out = Array<uint32_t>;
using U64Out = Array<uint64_t>;

inline constexpr uint32_t NONE = 0xffffffff;
inline constexpr uint32_t UNIQUE_MAX = 1u << 30;  // twice as many times still fit in 32 bits

inline void require_ids(const uint32_t* ids, size_t count, uint32_t unique) {
  uint32_t highest = 0;
  for (size_t at = 0; at < count; at++) highest = std::max(highest, ids[at]);
  if (count && highest >= unique) throw std::invalid_argument("an id is not below the number of unique blocks");
}

inline void require_ends(const U32& ids, const U64& ends, uint32_t unique) {
  if (unique > UNIQUE_MAX) throw std::invalid_argument("more than 2^30 unique blocks");
  uint64_t last = 0;
  bool ordered = true;
  for (size_t r = 0; r < ends.shape(0); r++) {
    ordered &= ends.data()[r] >= last;
    last = ends.data()[r];
  }
  if (!ordered || last != ids.shape(0)) throw std::invalid_argument("ends must rise to the number of ids");
}

inline void require_trace(const U32& ids, const U64& ends, uint32_t unique) {
  require_ends(ids, ends, unique);
  require_ids(ids.data(), ids.shape(0), unique);
}

}  // namespace kv::plan
