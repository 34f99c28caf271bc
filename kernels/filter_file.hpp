// The filter of a store that was stopped cleanly, as a file: DIR/filter. docs/FORMAT.md is the text to this.
//
//   FilterHead | buckets x 6 bytes | stash x FilterHomeless
//
// A filter of another state of the index would say "no" to what is stored. So a clean stop draws a number and its last commit puts it into
// the index; a file counts only where `state`, the index and the file name the same one and nothing was committed since.
#pragma once
#include <memory>
#include <string>

#include "filter.hpp"

namespace kv {

inline constexpr uint64_t FILTER_MAGIC = 0x31544c494653564bull;  // "KVSFILT1"
inline constexpr uint32_t FILTER_VERSION = 1;

// The state of an index that a filter belongs to.
struct FilterState {
  uint64_t stop;        // drawn at the clean stop; 0: none
  uint64_t last_txn;    // the commit that put it into the index
};

struct FilterHead {
  uint64_t magic;
  uint32_t version, slots;      // 4 slots of 12 bits a bucket
  FilterState state;
  uint32_t buckets, stash;
  uint64_t keys, zero;
  uint64_t sum;                 // xxh3-64 of the whole file with this field zero
};
static_assert(sizeof(FilterHead) == 64);
struct FilterHomeless { uint32_t bucket, fingerprint; };
static_assert(sizeof(FilterHomeless) == 8);

std::string filter_path(const std::string& dir);
// Written beside and renamed, synced. False: errno; nothing is left.
bool save_filter(const std::string& dir, const CuckooFilter& filter, const FilterState& state);
// None: `why` says why not, in a few words.
std::unique_ptr<CuckooFilter> load_filter(const std::string& dir, const FilterState& state, std::string& why);

}  // namespace kv
