// Block bytes made from the block's key, so that replay and tests can check every byte they read without keeping a copy.
//
//   seed = xxh3-64(key, seed = salt);  word i (u64 LE) = splitmix64(seed + (i + 1) * GAMMA);  the last word is cut where the block ends
//
// Counter mode: any word can be made alone. Another salt gives other bytes for the same key, as two writers of one prefix do.
// kvstore/kernels/generate_reference.py is the plain reference. Not secret, not stored: may change.
#include <stdexcept>

#include "bind.hpp"
#include "common.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {
namespace {

constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15ull;

inline uint64_t word(uint64_t counter) {
  uint64_t z = counter;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void generate(uint64_t seed, uint8_t* out, size_t bytes) {
  uint64_t counter = seed;
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    const uint64_t w = word(counter += GAMMA);
    std::memcpy(out + at, &w, 8);
  }
  if (at < bytes) {
    const uint64_t w = word(counter + GAMMA);
    std::memcpy(out + at, &w, bytes - at);
  }
}

bool matches(uint64_t seed, const uint8_t* in, size_t bytes) {
  uint64_t counter = seed, differences = 0;
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    uint64_t w;
    std::memcpy(&w, in + at, 8);
    differences |= w ^ word(counter += GAMMA);
  }
  if (at < bytes) {
    const uint64_t w = word(counter + GAMMA);
    differences |= uint64_t(std::memcmp(in + at, &w, bytes - at) != 0);
  }
  return differences == 0;
}

template <typename Rows>
void require_fit(const Bytes2& keys, size_t block_bytes, const Rows& blocks) {
  if (keys.shape(1) != KEY_BYTES) throw std::invalid_argument("keys have 32 bytes");
  if (blocks.shape(0) != keys.shape(0)) throw std::invalid_argument("one row for each key");
  if (blocks.shape(1) != block_bytes) throw std::invalid_argument("rows must have block_bytes bytes");
  if (!rows_are_dense(blocks)) throw std::invalid_argument("rows must be contiguous and must not overlap");
}

void generate_blocks(Bytes2 keys, size_t block_bytes, RowsOut out, uint64_t salt) {
  require_fit(keys, block_bytes, out);
  nb::gil_scoped_release release;
  for (size_t b = 0; b < keys.shape(0); b++)
    generate(XXH3_64bits_withSeed(keys.data() + b * KEY_BYTES, KEY_BYTES, salt), out.data() + ptrdiff_t(b) * out.stride(0), block_bytes);
}

ptrdiff_t verify_blocks(Bytes2 keys, size_t block_bytes, Rows blocks, uint64_t salt) {
  require_fit(keys, block_bytes, blocks);
  nb::gil_scoped_release release;
  for (size_t b = 0; b < keys.shape(0); b++)
    if (!matches(XXH3_64bits_withSeed(keys.data() + b * KEY_BYTES, KEY_BYTES, salt), blocks.data() + ptrdiff_t(b) * blocks.stride(0), block_bytes))
      return ptrdiff_t(b);
  return -1;
}

}  // namespace
}  // namespace kv

void bind_generate(nb::module_& m) {
  m.def("generate_blocks", &kv::generate_blocks, "keys"_a.noconvert(), "block_bytes"_a, "out"_a.noconvert(), "salt"_a = 0);
  m.def("verify_blocks", &kv::verify_blocks, "keys"_a.noconvert(), "block_bytes"_a, "blocks"_a.noconvert(), "salt"_a = 0);
}
