// What servers tell Python of their front, alike.
#pragma once
#include <nanobind/nanobind.h>

#include <initializer_list>

#include "server_shared.hpp"

namespace kv {

nanobind::dict histogram(const Histogram& h);   // counts, sum_seconds
nanobind::dict counters(const Counter* values, uint32_t count);   // by Status number, zeros left out
// By verb of `ops` and by status number where it has those; and the counters of connections.
nanobind::dict front_stats(const FrontShared& shared, std::initializer_list<Op> ops);

}  // namespace kv
