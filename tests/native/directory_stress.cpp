// A window directory without its sockets, for the sanitizers: right and wrong bodies of every verb, agents that come and go, time that
// jumps, a table at its memory's end. test_directory_sanitized.py builds and runs it.
//
//   directory_stress ROUNDS SEED       exit 0: every answer adds up, and all counts agree at the end
//
// A second thread reads the counters meanwhile, as Python does.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "directory.hpp"

using namespace kv;
using namespace kv::directory;

namespace {

std::mt19937_64 dice;
uint64_t below(uint64_t n) { return dice() % n; }

void need(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

std::vector<uint8_t> keys_of(uint32_t count) {
  std::vector<uint8_t> keys(size_t(count) * KEY_BYTES);
  for (uint32_t i = 0; i < count; i++) {
    const uint64_t number = below(60'000);   // few, so that agents meet
    for (uint32_t part = 0; part < 4; part++) {
      const uint64_t h = XXH3_64bits_withSeed(&number, sizeof number, part);
      std::memcpy(keys.data() + size_t(i) * KEY_BYTES + 8 * part, &h, 8);
    }
  }
  return keys;
}

template <class T>
void append(std::vector<uint8_t>& out, const T& value) {
  const auto* at = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), at, at + sizeof value);
}

void append_address(std::vector<uint8_t>& out, uint64_t agent) {
  const std::string address = "10.0.0." + std::to_string(agent) + ":7600";
  out.insert(out.end(), address.begin(), address.end());
  out.resize(wire::padded8(out.size()));
}
uint16_t address_bytes(uint64_t agent) { return uint16_t(("10.0.0." + std::to_string(agent) + ":7600").size()); }

std::vector<uint8_t> body_of(wire::Verb verb, uint64_t agent, uint64_t clock_ms, uint32_t& count) {
  std::vector<uint8_t> out;
  count = uint32_t(below(4) ? below(64) : below(wire::LOCATE_KEYS_MAX + 1));
  if (verb == wire::Verb::STATUS) return out;
  if (verb == wire::Verb::REPORT) {
    append(out, wire::AgentName{below(3), address_bytes(agent), 0, 0});
    append_address(out, agent);
    return out;
  }
  if (verb == wire::Verb::LOCATE) {
    append(out, wire::LocateRequest{{}, clock_ms, count, 0});
  } else {
    const bool all = verb == wire::Verb::FORGET && below(20) == 0;
    if (all) count = 0;
    append(out, wire::AgentRequest{{}, below(3), 1, clock_ms, count, address_bytes(agent), uint16_t(all)});
    append_address(out, agent);
  }
  const auto keys = keys_of(count);
  out.insert(out.end(), keys.begin(), keys.end());
  return out;
}

// Leaves alone what names the start of an agent and the time, which would stand still for the rest of the run.
void spoil(std::vector<uint8_t>& body) {
  if (below(3) == 0) body.resize(below(body.size() + 1));
  for (uint64_t n = below(4); n && !body.empty(); n--)
    if (const size_t at = below(std::min<size_t>(body.size(), 96)); at < 16 || at >= 40) body[at] = uint8_t(dice());
  if (below(4) == 0) body.insert(body.end(), below(9), uint8_t(dice()));
}

void check_locate(const std::vector<uint8_t>& reply, uint32_t count) {
  wire::LocateReply head;
  need(reply.size() >= sizeof head, "LOCATE: short");
  std::memcpy(&head, reply.data(), sizeof head);
  size_t at = sizeof head;
  for (uint32_t i = 0; i < head.agents; i++) {
    wire::AgentName name;
    need(at + sizeof name <= reply.size(), "LOCATE: agents");
    std::memcpy(&name, reply.data() + at, sizeof name);
    at += sizeof name + wire::padded8(name.address_bytes);
  }
  uint32_t holders = 0;
  for (uint32_t i = 0; i < count; i++) {
    need(reply[at + i] <= wire::HOLDERS_MAX, "LOCATE: holders of a key");
    holders += reply[at + i];
  }
  at += wire::padded8(count);
  need(holders == head.holders && at + holders * sizeof(wire::Holder) == reply.size(), "LOCATE: holders");
  for (; at < reply.size(); at += sizeof(wire::Holder)) {
    wire::Holder holder;
    std::memcpy(&holder, reply.data() + at, sizeof holder);
    need(holder.agent < head.agents && holder.left_ms <= 11'000, "LOCATE: a holder");
  }
}

}  // namespace

int main(int argc, char** argv) {
  need(argc == 3, "directory_stress ROUNDS SEED");
  const uint64_t rounds = std::strtoull(argv[1], nullptr, 10);
  dice.seed(std::strtoull(argv[2], nullptr, 10));
  Directory directory({.memory_bytes = (1 << 20) + 12 * ((64 << 10) + 64), .lifetime_ms = 10'000, .virtual_clock = true});
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over.load()) need(directory.status().memory_bytes > 0, "status");
  });
  constexpr wire::Verb VERBS[] = {wire::Verb::REGISTER, wire::Verb::REGISTER, wire::Verb::LOCATE, wire::Verb::LOCATE,
                                  wire::Verb::TOUCH,    wire::Verb::FORGET,   wire::Verb::REPORT, wire::Verb::STATUS};
  std::vector<uint32_t> connections(64);
  uint64_t clock_ms = 1'000'000, done = 0;
  std::vector<uint8_t> reply;
  for (uint64_t round = 0; round < rounds; round++) {
    clock_ms += below(2000) == 0 ? below(100) * 10'000 : below(3);
    const uint64_t who = below(connections.size());
    const wire::Verb verb = VERBS[below(8)];
    uint32_t count = 0;
    auto body = body_of(verb, connections[who] && below(10) ? who % 20 : below(20), clock_ms, count);
    const bool wrong = below(4) == 0;
    if (wrong) spoil(body);
    // Exactly sized, on the heap: one byte too far is seen.
    const std::vector<uint8_t> exact(body);
    reply.clear();
    const Status status = directory.answer(verb, exact.data(), exact.size(), connections[who], reply);
    need((status == Status::OK) == !reply.empty(), "a body without OK, or OK without one");
    need(reply.size() <= wire::SMALL_BODY_MAX, "a reply beyond its limit");
    if (status == Status::OK && !wrong && verb == wire::Verb::LOCATE) check_locate(reply, count);
    done += status == Status::OK;
    if (status == Status::BAD_REQUEST || status == Status::TOO_LARGE || below(200) == 0) {
      directory.closed(connections[who]);
      connections[who] = 0;
    }
    if (below(50) == 0) directory.tick();
  }
  over.store(true);
  reader.join();
  need(done > rounds / 4 && directory.table.stats.evicted.load() && directory.table.stats.displaced.load() && directory.table.stats.expired.load(),
       "not everything was met");
  uint64_t entries = 0;
  for (uint32_t agent = 1; agent <= AGENTS_MAX; agent++) entries += directory.table.entries_of(agent);
  need(entries == directory.table.stats.entries.load(), "entries by agent do not add up");
  for (auto& each : connections) directory.closed(each);
  need(directory.agents.connected.load() == 0, "agents that nobody speaks for");
  for (int i = 0; i < 100; i++) {   // all is swept and forgotten in the end
    wire::LocateRequest empty{{}, clock_ms += 10'000, 0, 0};
    reply.clear();
    uint32_t nobody = 0;
    directory.answer(wire::Verb::LOCATE, reinterpret_cast<uint8_t*>(&empty), sizeof empty, nobody, reply);
    directory.tick();
  }
  need(directory.table.stats.entries.load() == 0 && directory.agents.known.load() == 0, "something stays for ever");
  return 0;
}
