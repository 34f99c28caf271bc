// Bodies of a window directory's verbs. docs/PROTOCOL.md is the text to this, kvstore/wire_directory.py the plain twin.
//
// An agent is named by its address ("host:port"), which is padded with zeros to a multiple of 8 wherever it stands. `incarnation` orders
// the starts of one agent, and is told to who asks; `token` is its secret, and is told to nobody. `clock_ms` is looked at by a directory
// with a virtual clock alone.
#pragma once
#include "wire.hpp"

namespace kv::wire {

inline constexpr uint32_t LOCATE_KEYS_MAX = 1024;   // so that the longest reply keeps within SMALL_BODY_MAX
inline constexpr uint32_t AGENT_ADDRESS_MAX = 128;
inline constexpr uint32_t HOLDERS_MAX = 4;          // of one key
inline constexpr uint64_t CLOCK_MS_MAX = 1ull << 50;
inline constexpr uint16_t FORGET_ALL = 1;

// REGISTER, TOUCH, FORGET: AgentRequest | address | count x 32-byte keys. Reply: AgentReply.
struct AgentRequest {
  uint8_t owner[OWNER_BYTES];
  uint64_t incarnation, token, clock_ms;
  uint32_t count;
  uint16_t address_bytes;
  uint16_t flags;              // FORGET: FORGET_ALL with no keys; else zero
};
struct AgentReply { uint32_t done, lifetime_ms; };   // done: keys registered, found and touched, found and forgotten
static_assert(sizeof(AgentRequest) == 48);
static_assert(sizeof(AgentReply) == 8);

// LOCATE: LocateRequest | count x 32-byte keys.
// Reply: LocateReply | agents x { AgentName | address } | count x u8: holders of each key, zero padding to 8 | holders x Holder, key by key.
struct LocateRequest { uint8_t owner[OWNER_BYTES]; uint64_t clock_ms; uint32_t count, zero; };
struct LocateReply { uint32_t agents, holders; };
struct AgentName { uint64_t incarnation; uint16_t address_bytes, zero; uint32_t zero2; };
struct Holder { uint32_t left_ms; uint16_t agent, zero; };   // agent: ordinal among those of this reply
static_assert(sizeof(LocateRequest) == 32);
static_assert(sizeof(LocateReply) == 8);
static_assert(sizeof(AgentName) == 16);
static_assert(sizeof(Holder) == 8);

// REPORT ("could not be reached"): AgentName | address. Reply: ReportReply.
struct ReportReply { uint32_t hidden, zero; };
static_assert(sizeof(ReportReply) == 8);

// STATUS: no body. Reply: DirectoryStatus.
struct DirectoryStatus {
  uint64_t entries, agents, memory_bytes, memory_max_bytes, lifetime_ms, uptime_ms;
  uint64_t keys_registered, keys_located, keys_found, keys_touched, keys_forgotten;   // totals
  uint64_t expired, evicted, displaced;                                               // entries gone, by why
};
static_assert(sizeof(DirectoryStatus) == 112);

inline constexpr size_t padded8(size_t n) { return (n + 7) / 8 * 8; }
static_assert(sizeof(LocateReply) + LOCATE_KEYS_MAX * (1 + HOLDERS_MAX * (sizeof(AgentName) + AGENT_ADDRESS_MAX + sizeof(Holder))) <= SMALL_BODY_MAX);
static_assert(sizeof(AgentRequest) + AGENT_ADDRESS_MAX + KEYS_MAX * KEY_BYTES <= SMALL_BODY_MAX);

}  // namespace kv::wire
