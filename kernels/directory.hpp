// A window directory without its sockets: bodies of requests in, bodies of replies out (directory_wire.hpp).
#pragma once
#include "directory_agents.hpp"
#include "directory_table.hpp"
#include "directory_wire.hpp"

namespace kv::directory {

struct Config {
  uint64_t memory_bytes = 1'000'000'000;   // of the table
  uint32_t lifetime_ms = 180'000;          // of an entry after its last use
  bool virtual_clock = false;              // time is what requests say
};

inline constexpr uint64_t AGENT_ENTRIES_MAX = 1 << 20;   // of one agent: 1.4 TB of windows; what it registers past them is not taken

struct DirectoryStats {
  Counter keys_registered{0}, keys_located{0}, keys_found{0}, keys_touched{0}, keys_forgotten{0}, keys_refused{0};
};

// One thread, but for the counters.
class Directory {
 public:
  explicit Directory(const Config& config);
  // Appends the body of the reply to `out`, which is empty. `conn_agent`: who speaks on this connection, 0 before its first word.
  Status answer(wire::Verb verb, const uint8_t* body, size_t bytes, uint32_t& conn_agent, std::vector<uint8_t>& out);
  void closed(uint32_t conn_agent) { agents.closed(conn_agent); }
  void tick();   // now and then: sweeps
  wire::DirectoryStatus status() const;   // any thread

  const Config config;
  DirectoryStats stats;
  Table table;
  Agents agents;

 private:
  struct Keys;
  Status speak(wire::Verb verb, const uint8_t* body, size_t bytes, uint32_t& conn_agent, std::vector<uint8_t>& out);
  Status locate(const uint8_t* body, size_t bytes, std::vector<uint8_t>& out);
  Status report(const uint8_t* body, size_t bytes, std::vector<uint8_t>& out);
  bool set_clock(uint64_t clock_ms);   // false: out of range
  template <class Use>
  void each(const uint8_t* owner, const uint8_t* keys, uint32_t count, Use use);

  const int64_t started_ns_;
  uint64_t clock_ms_ = 0;      // virtual
  uint64_t now_ = 0;           // ticks
  uint64_t silent_at_ = 0;     // when silent agents were last forgotten
  uint64_t answers_ = 0;
  std::vector<Held> held_;     // of one LOCATE
  std::vector<uint8_t> counts_;
  std::vector<uint32_t> named_;
};

}  // namespace kv::directory
