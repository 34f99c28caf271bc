// What any listening port of ours is told, and what its threads share: of a storage daemon (server.hpp) and of a window directory.
#pragma once
#include <array>
#include <string>

#include "server_stats.hpp"

namespace kv {

struct FrontConfig {
  std::string host = "127.0.0.1";
  uint16_t port = 0;                     // 0: any free one
  std::array<uint8_t, 16> cluster{};     // wire::Hello::cluster
  uint64_t epoch = 0;
  uint32_t connections_max = 4096;
  uint32_t idle_ms = 300'000;            // a connection without requests is closed after this
  std::string congestion_control;        // of TCP, for all connections; "": the host's
  uint32_t progress_ms = 3'000;          // a peer that neither takes nor gives bytes it owes is cut after this
};

// Nothing in it changes after start but the atomics.
struct FrontShared {
  explicit FrontShared(const FrontConfig& c) : front(c), epoch(c.epoch) {}
  const FrontConfig front;
  ServerStats stats;
  std::atomic<uint64_t> epoch;
  std::atomic<bool> draining{false};
  std::atomic<uint64_t> inflight{0};     // requests accepted and not answered
  uint64_t boot_id = 0;                  // random, never zero
};

}  // namespace kv
