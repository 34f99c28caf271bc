// Whom a lookup asks about which key (kvstore/client/planner.py). Plain rule: kvstore/kernels/asking_reference.py.
//
// A key has one list of nodes in each epoch. first() covers the lists of all keys in rounds: of each key that has a list nobody speaks for
// it takes the candidates (the healthiest nodes; of these, those of most such lists), and from them chooses few nodes in all.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind.hpp"

namespace kv {
namespace {

using namespace nb::literals;
using Lists = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;   // of one epoch: (placement groups, shards) of nodes

constexpr uint32_t KEYS_PER_NODE = 256;                    // about 50 us of a daemon's time: more nodes would cost more in messages than they save
constexpr uint32_t KEYS_PER_NODE_MIN = KEYS_PER_NODE / 8;  // a node that stands in fewer lists is not worth a search
constexpr uint8_t LATE = 1, DOWN = 3;                      // Node::health() of client_net.hpp

void need(bool fine, const char* what) {
  if (!fine) throw std::invalid_argument(what);
}

struct Asks {
  std::vector<int32_t> keys, nodes;
  void add(uint32_t key, uint32_t node) {
    keys.push_back(int32_t(key));
    nodes.push_back(int32_t(node));
  }
};

// Of each key in `keys` the nodes from which one is to be chosen: nodes[ends[i - 1] .. ends[i]).
struct Candidates {
  std::vector<uint32_t> keys, ends, nodes;
  std::pair<uint32_t, uint32_t> of(size_t i) const { return {i ? ends[i - 1] : 0, ends[i]}; }
};

class Asking {
 public:
  Asking(const Lists& lists, const Bytes1& health, uint64_t seed)
      : Asking(uint32_t(lists.shape(0)), uint32_t(lists.shape(1)), uint32_t(lists.shape(2)), health, seed) {
    own_.assign(lists.data(), lists.data() + lists.size());
    for (size_t at = 0; at < rows_.size(); at++) rows_[at] = own_.data() + at * shards_;
    check();
  }

  // By the tables of placement groups, which are read where they lie: a key's group is the top bits of its first 4 bytes.
  Asking(std::vector<Table> tables, const Bytes2& keys, const Bytes1& health, uint64_t seed)
      : Asking(uint32_t(tables.size()), uint32_t(keys.shape(0)), tables.empty() ? 0 : uint32_t(tables[0].shape(1)), health, seed) {
    need(keys.shape(1) >= 4, "keys: (n, 32)");
    for (uint32_t e = 0; e < epochs_; e++) {
      const size_t groups = tables[e].shape(0);
      need(std::has_single_bit(groups) && groups <= size_t(1) << 31 && tables[e].shape(1) == shards_, "tables: (2^n, shards)");
      const int bits = std::countr_zero(groups);
      for (uint32_t k = 0; k < keys_; k++) {
        uint32_t front;
        std::memcpy(&front, keys.data() + size_t(k) * keys.shape(1), 4);
        const size_t group = bits ? __builtin_bswap32(front) >> (32 - bits) : 0;
        rows_[size_t(e) * keys_ + k] = tables[e].data() + group * shards_;
      }
    }
    tables_ = std::move(tables);
    check();
  }

  Asks first() {
    Asks out;
    std::vector<uint8_t> spoken(size_t(epochs_) * keys_);   // a node of this list is asked
    std::vector<uint32_t> open(keys_);
    std::iota(open.begin(), open.end(), 0u);
    while (!open.empty()) {
      const std::vector<uint32_t> chosen = choose(candidates(open, spoken));
      std::vector<uint32_t> left;
      for (size_t i = 0; i < open.size(); i++) {
        const uint32_t key = open[i];
        ask(key, chosen[i], out);
        bool all = true;
        for (uint32_t e = 0; e < epochs_; e++) all &= spoken[size_t(e) * keys_ + key] |= stands(e, key, chosen[i]);
        if (!all) left.push_back(key);
      }
      open.swap(left);
    }
    return out;
  }

  Asks elsewhere(const Ints& indices, uint32_t times) {
    Asks out;
    std::vector<uint32_t> tally(health_.size()), mine;
    for (size_t i = 0; i < indices.shape(0); i++) {
      const uint32_t key = uint32_t(indices(i));
      mine.clear();
      for (uint32_t e = 0; e < epochs_; e++) {
        // A node that was chosen for another epoch's list speaks for this one, too.
        auto have = uint32_t(std::count_if(mine.begin(), mine.end(), [&](uint32_t node) { return stands(e, key, node); }));
        for (; have < times; have++) {
          const uint32_t node = next(e, key, tally);
          if (node == NOBODY) break;
          tally[node]++;
          mine.push_back(node);
          ask(key, node, out);
        }
      }
    }
    return out;
  }

  void avoid(const Words& late) {
    for (size_t i = 0; i < late.shape(0); i++) health_[late(i)] = std::max(health_[late(i)], LATE);
  }

  uint32_t keys() const { return keys_; }
  size_t nodes() const { return health_.size(); }

  // keys.size() lists, those of each key in an epoch by its position.
  std::vector<int32_t> lists_of(const Words& keys, const Words& epochs) const {
    std::vector<int32_t> out;
    out.reserve(keys.size() * shards_);
    for (size_t i = 0; i < keys.size(); i++) {
      const int32_t* at = rows_.at(size_t(epochs(i)) * keys_ + keys(i));
      out.insert(out.end(), at, at + shards_);
    }
    return out;
  }

 private:
  static constexpr uint32_t NOBODY = UINT32_MAX;

  Asking(uint32_t epochs, uint32_t keys, uint32_t shards, const Bytes1& health, uint64_t seed)
      : epochs_(epochs), keys_(keys), shards_(shards), seed_(seed), rows_(size_t(epochs) * keys), health_(health.data(), health.data() + health.size()),
        asked_(keys_, NOBODY) {
    need(epochs_ && shards_, "lists: of an epoch, and a shard, at least");
  }

  void check() const {
    for (const int32_t* row : rows_)
      need(std::all_of(row, row + shards_, [this](int32_t node) { return uint32_t(node) < health_.size(); }), "lists: of nodes whose health is given");
  }

  const uint32_t* list(uint32_t epoch, uint32_t key) const { return reinterpret_cast<const uint32_t*>(rows_[size_t(epoch) * keys_ + key]); }

  bool stands(uint32_t epoch, uint32_t key, uint32_t node) const {
    const uint32_t* at = list(epoch, key);
    return std::find(at, at + shards_, node) != at + shards_;
  }

  void ask(uint32_t key, uint32_t node, Asks& out) {
    asks_.push_back({node, asked_[key]});
    asked_[key] = uint32_t(asks_.size() - 1);
    out.add(key, node);
  }

  bool was_asked(uint32_t key, uint32_t node) const {
    for (uint32_t at = asked_[key]; at != NOBODY; at = asks_[at].before)
      if (asks_[at].node == node) return true;
    return false;
  }

  // The healthiest node of a list that is up and was not asked, one that is asked about other keys before one that is not.
  uint32_t next(uint32_t epoch, uint32_t key, const std::vector<uint32_t>& tally) const {
    uint32_t best = NOBODY;
    const uint32_t* at = list(epoch, key);
    for (uint32_t s = 0; s < shards_; s++) {
      const uint32_t node = at[s];
      if (health_[node] == DOWN || was_asked(key, node)) continue;
      if (best == NOBODY || health_[node] < health_[best] || (health_[node] == health_[best] && tally[node] > tally[best])) best = node;
    }
    return best;
  }

  Candidates candidates(const std::vector<uint32_t>& open, const std::vector<uint8_t>& spoken) const {
    Candidates out{open, {}, {}};
    out.nodes.reserve(open.size() * shards_);
    const bool level = std::all_of(health_.begin(), health_.end(), [this](uint8_t health) { return health == health_.front(); });
    std::vector<uint32_t> lists_of(health_.size()), seen(health_.size());   // of the key at hand; stamp of the last list that named it
    std::vector<uint32_t> nodes;
    uint32_t stamp = 0;
    for (const uint32_t key : open) {
      if (epochs_ == 1 && level) {   // nearly always: all of the list
        stamp++;
        for (const uint32_t* at = list(0, key); at != list(0, key) + shards_; at++)
          if (std::exchange(seen[*at], stamp) != stamp) out.nodes.push_back(*at);
        out.ends.push_back(uint32_t(out.nodes.size()));
        continue;
      }
      nodes.clear();
      for (uint32_t e = 0; e < epochs_; e++) {
        if (spoken[size_t(e) * keys_ + key]) continue;
        stamp++;
        const uint32_t* at = list(e, key);
        for (uint32_t s = 0; s < shards_; s++) {
          const uint32_t node = at[s];
          if (seen[node] == stamp) continue;   // with fewer nodes than shards
          seen[node] = stamp;
          if (!lists_of[node]++) nodes.push_back(node);
        }
      }
      auto better = [&](uint32_t a, uint32_t b) { return health_[a] != health_[b] ? health_[a] < health_[b] : lists_of[a] > lists_of[b]; };
      const uint32_t best = *std::min_element(nodes.begin(), nodes.end(), better);
      for (const uint32_t node : nodes)
        if (!better(best, node)) out.nodes.push_back(node);
      for (const uint32_t node : nodes) lists_of[node] = 0;
      out.ends.push_back(uint32_t(out.nodes.size()));
    }
    return out;
  }

  // One candidate of each key: few nodes in all, none of them with much more than KEYS_PER_NODE while others have fewer.
  std::vector<uint32_t> choose(const Candidates& from) const {
    const size_t count = from.keys.size(), all = health_.size();
    std::vector<uint32_t> chosen(count, NOBODY), counts(all), given(all), turns(all, 1), begins(all + 1), keys_of(from.nodes.size());
    for (const uint32_t node : from.nodes) counts[node]++;
    std::partial_sum(counts.begin(), counts.end(), begins.begin() + 1);
    std::vector<uint32_t> fill(begins.begin(), begins.end() - 1), used;
    for (size_t i = 0; i < count; i++)
      for (auto [at, end] = from.of(i); at < end; at++) keys_of[fill[from.nodes[at]]++] = uint32_t(i);
    for (size_t node = 0; node < all; node++)
      if (counts[node]) used.push_back(uint32_t(node));
    // Equals in a different order each time, so that lookups spread over the nodes.
    std::rotate(used.begin(), used.begin() + long(seed_ % used.size()), used.end());
    for (size_t left = count; left;) {
      const uint32_t node = *std::max_element(used.begin(), used.end(), [&](uint32_t a, uint32_t b) { return counts[a] / turns[a] < counts[b] / turns[b]; });
      if (counts[node] / turns[node] < KEYS_PER_NODE_MIN && left < count) break;
      uint32_t took = 0;
      for (uint32_t at = begins[node]; at < begins[node + 1] && took < KEYS_PER_NODE; at++) {
        const uint32_t i = keys_of[at];
        if (chosen[i] != NOBODY) continue;
        chosen[i] = node;
        took++;
        for (auto [c, end] = from.of(i); c < end; c++) counts[from.nodes[c]]--;
      }
      given[node] += took;
      turns[node]++;
      left -= took;
    }
    for (size_t i = 0; i < count; i++) {   // the rest: with those that are asked already, else with those of most
      if (chosen[i] != NOBODY) continue;
      const auto [at, end] = from.of(i);
      chosen[i] = *std::max_element(from.nodes.begin() + at, from.nodes.begin() + end, [&](uint32_t a, uint32_t b) {
        return given[a] != given[b] ? given[a] < given[b] : counts[a] < counts[b];
      });
      given[chosen[i]]++;
    }
    return chosen;
  }

  struct Ask { uint32_t node, before; };
  const uint32_t epochs_, keys_, shards_;
  const uint64_t seed_;
  std::vector<int32_t> own_;
  std::vector<Table> tables_;
  std::vector<const int32_t*> rows_;   // by epoch and key: a list, in own_ or tables_
  std::vector<uint8_t> health_;
  std::vector<uint32_t> asked_;   // by key: its last of asks_
  std::vector<Ask> asks_;
};

nb::tuple pair_of(Asks&& asks) { return nb::make_tuple(array_of(std::move(asks.keys)), array_of(std::move(asks.nodes))); }

}  // namespace
}  // namespace kv

void bind_asking(nanobind::module_& m) {
  using namespace kv;
  nb::class_<Asking>(m, "Asking")
      .def(nb::init<const Lists&, const Bytes1&, uint64_t>(), "lists"_a.noconvert(), "health"_a.noconvert(), "seed"_a)
      .def(nb::init<std::vector<Table>, const Bytes2&, const Bytes1&, uint64_t>(), "tables"_a.noconvert(), "keys"_a.noconvert(), "health"_a.noconvert(),
           "seed"_a)
      .def(
          "lists_of",
          [](Asking& self, const Words& keys, const Words& epochs) {
            need(keys.size() == epochs.size(), "lists_of: an epoch for each key");
            for (size_t i = 0; i < keys.size(); i++) need(keys(i) < self.keys(), "keys: of those given");
            return array_of(self.lists_of(keys, epochs));
          },
          "keys"_a.noconvert(), "epochs"_a.noconvert())
      .def("first", [](Asking& self) { return pair_of(self.first()); })
      .def(
          "elsewhere",
          [](Asking& self, const Ints& indices, uint32_t times) {
            for (size_t i = 0; i < indices.shape(0); i++) need(uint32_t(indices(i)) < self.keys(), "indices: of the keys");
            return pair_of(self.elsewhere(indices, times));
          },
          "indices"_a.noconvert(), "times"_a)
      .def(
          "avoid",
          [](Asking& self, const Words& late) {
            for (size_t i = 0; i < late.shape(0); i++) need(late(i) < self.nodes(), "late: of the nodes");
            self.avoid(late);
          },
          "late"_a.noconvert());
}
