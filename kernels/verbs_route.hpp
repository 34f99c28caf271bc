// What is said of the way that packets take, apart from verbs.hpp for who configures it without a device at hand.
#pragma once
#include <cstdint>

namespace kv::verbs {

inline constexpr int ANY_GID = -1;   // the port's best: verbs.cpp, rank()

struct Route {
  uint8_t traffic_class = 0;   // of what this end sends, acknowledgements too; RoCE v2 has it in the IP header: DSCP are its upper six bits
  int gid_index = ANY_GID;
};

}  // namespace kv::verbs
