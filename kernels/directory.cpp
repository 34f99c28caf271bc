// See directory.hpp.
#include "directory.hpp"

#include <errno.h>
#include <sys/random.h>

#include <algorithm>
#include <system_error>

namespace kv::directory {
namespace {

constexpr uint32_t AHEAD = 16;   // keys whose places are fetched before they are looked at

std::array<uint8_t, 16> random_secret() {
  std::array<uint8_t, 16> secret;
  if (getrandom(secret.data(), secret.size(), 0) < 0) throw std::system_error(errno, std::generic_category(), "getrandom");
  return secret;
}

template <class T>
void append(std::vector<uint8_t>& out, const T& value) {
  const auto* at = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), at, at + sizeof value);
}

void append_address(std::vector<uint8_t>& out, std::string_view address) {
  out.insert(out.end(), address.begin(), address.end());
  out.resize(wire::padded8(out.size()));
}

// The address at `at`, of a body whose next part begins `padded8(bytes)` later; empty: not an address.
std::string_view address_at(const uint8_t* at, size_t bytes) {
  if (!bytes || bytes > wire::AGENT_ADDRESS_MAX) return {};
  for (size_t i = 0; i < wire::padded8(bytes); i++)
    if (i < bytes ? at[i] <= ' ' || at[i] >= 127 : at[i] != 0) return {};
  return {reinterpret_cast<const char*>(at), bytes};
}

}  // namespace

Directory::Directory(const Config& c) : config(c), table(c.memory_bytes, random_secret()), agents(table), started_ns_(now_ns()) { set_clock(0); }

bool Directory::set_clock(uint64_t clock_ms) {
  if (clock_ms > wire::CLOCK_MS_MAX) return false;
  if (config.virtual_clock) clock_ms_ = std::max(clock_ms_, clock_ms);
  const uint64_t us = config.virtual_clock ? clock_ms_ * 1000 : uint64_t(now_ns() - started_ns_) / 1000;
  now_ = 16 * TICKS + uint64_t(__uint128_t(us) * TICKS / (uint64_t(config.lifetime_ms) * 1000));   // well above 0: nothing was ever at 0
  return true;
}

void Directory::tick() {
  set_clock(0);
  table.sweep(now_);
  if (now_ - silent_at_ < TICKS / 4) return;
  silent_at_ = now_;
  agents.forget_silent(now_);
}

Status Directory::answer(wire::Verb verb, const uint8_t* body, size_t bytes, uint32_t& conn_agent, std::vector<uint8_t>& out) {
  switch (verb) {
    case wire::Verb::REGISTER:
    case wire::Verb::TOUCH:
    case wire::Verb::FORGET: return speak(verb, body, bytes, conn_agent, out);
    case wire::Verb::LOCATE: return locate(body, bytes, out);
    case wire::Verb::REPORT: return report(body, bytes, out);
    case wire::Verb::STATUS:
      if (bytes) return Status::BAD_REQUEST;
      append(out, status());
      return Status::OK;
    default: return Status::BAD_REQUEST;
  }
}

// Calls use(i, print) for each key. Memory is what it waits for: places are fetched some keys ahead.
template <class Use>
void Directory::each(const uint8_t* owner, const uint8_t* keys, uint32_t count, Use use) {
  Print ahead[AHEAD];
  for (uint32_t first = 0; first < count; first += AHEAD) {
    const uint32_t n = std::min(AHEAD, count - first);
    for (uint32_t i = 0; i < n; i++) {
      ahead[i] = table.print_of(owner, keys + size_t(first + i) * KEY_BYTES);
      table.prefetch(ahead[i]);
    }
    for (uint32_t i = 0; i < n; i++) use(first + i, ahead[i]);
  }
}

Status Directory::speak(wire::Verb verb, const uint8_t* body, size_t bytes, uint32_t& conn_agent, std::vector<uint8_t>& out) {
  wire::AgentRequest r;
  if (bytes < sizeof r) return Status::BAD_REQUEST;
  std::memcpy(&r, body, sizeof r);
  if (r.count > wire::KEYS_MAX || r.address_bytes > wire::AGENT_ADDRESS_MAX) return Status::TOO_LARGE;
  const size_t head = sizeof r + wire::padded8(r.address_bytes);
  if (bytes != head + size_t(r.count) * KEY_BYTES) return Status::BAD_REQUEST;
  const bool all = verb == wire::Verb::FORGET && r.flags == wire::FORGET_ALL && !r.count;
  if (r.flags && !all) return Status::BAD_REQUEST;
  const std::string_view address = address_at(body + sizeof r, r.address_bytes);
  if (address.empty() || !set_clock(r.clock_ms)) return Status::BAD_REQUEST;
  wire::AgentReply reply{0, config.lifetime_ms};
  const Status told = agents.speak({address, r.incarnation, r.token}, verb == wire::Verb::REGISTER, now_, conn_agent);
  if (told != Status::OK && told != Status::NOT_FOUND) return told;   // one that is not known has nothing to touch or forget
  if (told == Status::OK) {
    const uint32_t agent = conn_agent;
    const uint8_t* keys = body + head;
    if (all) {
      const uint64_t had = table.entries_of(agent);
      if (had && !table.wipe(agent, now_)) return Status::BUSY;
      reply.done = uint32_t(std::min<uint64_t>(had, UINT32_MAX));
    } else if (verb == wire::Verb::REGISTER) {
      each(r.owner, keys, r.count, [&](uint32_t, const Print& p) {
        if (table.entries_of(agent) >= AGENT_ENTRIES_MAX && !table.touch(p, agent, now_)) return;
        table.put(p, agent, now_);
        reply.done++;
      });
      bump(stats.keys_refused, r.count - reply.done);
    } else if (verb == wire::Verb::TOUCH) {
      each(r.owner, keys, r.count, [&](uint32_t, const Print& p) { reply.done += table.touch(p, agent, now_); });
    } else {
      each(r.owner, keys, r.count, [&](uint32_t, const Print& p) { reply.done += table.forget(p, agent, now_); });
    }
  }
  bump(verb == wire::Verb::REGISTER ? stats.keys_registered : verb == wire::Verb::TOUCH ? stats.keys_touched : stats.keys_forgotten, reply.done);
  append(out, reply);
  return Status::OK;
}

Status Directory::locate(const uint8_t* body, size_t bytes, std::vector<uint8_t>& out) {
  wire::LocateRequest r;
  if (bytes < sizeof r) return Status::BAD_REQUEST;
  std::memcpy(&r, body, sizeof r);
  if (r.count > wire::LOCATE_KEYS_MAX) return Status::TOO_LARGE;
  if (bytes != sizeof r + size_t(r.count) * KEY_BYTES || r.zero || !set_clock(r.clock_ms)) return Status::BAD_REQUEST;
  held_.clear();
  named_.clear();
  counts_.assign(wire::padded8(r.count), 0);
  answers_++;
  uint64_t found = 0;
  each(r.owner, body + sizeof r, r.count, [&](uint32_t i, const Print& p) {
    Held held[HOLDERS_MAX];
    const uint32_t n = table.locate(p, now_, held);
    for (const bool connected : {true, false})   // those that we hear come first
      for (uint32_t h = 0; h < n; h++) {
        Agent& agent = agents[held[h].agent];
        if (agent.hidden || (agent.connections != 0) != connected) continue;
        if (agent.answer != answers_) {
          agent.answer = answers_;
          agent.ordinal = uint32_t(named_.size());
          named_.push_back(held[h].agent);
        }
        held_.push_back({agent.ordinal, held[h].expiry});
        counts_[i]++;
      }
    found += counts_[i] != 0;
  });
  append(out, wire::LocateReply{uint32_t(named_.size()), uint32_t(held_.size())});
  for (const uint32_t number : named_) {
    const Agent& agent = agents[number];
    append(out, wire::AgentName{agent.incarnation, uint16_t(agent.address.size()), 0, 0});
    append_address(out, agent.address);
  }
  out.insert(out.end(), counts_.begin(), counts_.end());
  for (const Held& h : held_) append(out, wire::Holder{uint32_t((h.expiry - now_) * config.lifetime_ms / TICKS), uint16_t(h.agent), 0});
  bump(stats.keys_located, r.count);
  bump(stats.keys_found, found);
  return Status::OK;
}

Status Directory::report(const uint8_t* body, size_t bytes, std::vector<uint8_t>& out) {
  wire::AgentName r;
  if (bytes < sizeof r) return Status::BAD_REQUEST;
  std::memcpy(&r, body, sizeof r);
  if (r.address_bytes > wire::AGENT_ADDRESS_MAX) return Status::TOO_LARGE;
  if (bytes != sizeof r + wire::padded8(r.address_bytes) || r.zero || r.zero2) return Status::BAD_REQUEST;
  const std::string_view address = address_at(body + sizeof r, r.address_bytes);
  if (address.empty()) return Status::BAD_REQUEST;
  append(out, wire::ReportReply{agents.report(address, r.incarnation), 0});
  return Status::OK;
}

wire::DirectoryStatus Directory::status() const {
  const auto of = [](const Counter& c) { return c.load(std::memory_order_relaxed); };
  return {of(table.stats.entries),   of(agents.known),          of(table.stats.memory_bytes),        config.memory_bytes,
          config.lifetime_ms,        uint64_t(now_ns() - started_ns_) / 1'000'000,
          of(stats.keys_registered), of(stats.keys_located),    of(stats.keys_found),                of(stats.keys_touched),
          of(stats.keys_forgotten),  of(table.stats.expired),   of(table.stats.evicted),             of(table.stats.displaced)};
}

}  // namespace kv::directory
