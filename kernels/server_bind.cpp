// See server_bind.hpp.
#include "server_bind.hpp"

#include <utility>

namespace nb = nanobind;

namespace kv {

nb::dict histogram(const Histogram& h) {
  nb::list counts;
  for (const auto& c : h.counts) counts.append(c.load(std::memory_order_relaxed));
  nb::dict d;
  d["counts"] = counts;
  d["sum_seconds"] = double(h.sum_ns.load(std::memory_order_relaxed)) / 1e9;
  return d;
}

nb::dict counters(const Counter* values, uint32_t count) {
  nb::dict d;
  for (uint32_t i = 0; i < count; i++)
    if (const uint64_t n = values[i].load(std::memory_order_relaxed)) d[nb::int_(i)] = n;
  return d;
}

nb::dict front_stats(const FrontShared& shared, std::initializer_list<Op> ops) {
  const ServerStats& s = shared.stats;
  nb::dict d, requests, seconds, queued;
  for (const Op each : ops) {
    const uint32_t op = uint32_t(each);
    requests[OP_NAMES[op]] = counters(s.requests[op], STATUSES);
    queued[OP_NAMES[op]] = s.queued[op].load();
    seconds[OP_NAMES[op]] = histogram(s.seconds[op]);
  }
  nb::list bounds;
  for (uint64_t us : Histogram::BOUNDS_US) bounds.append(double(us) / 1e6);
  d["bounds_seconds"] = bounds;
  d["requests"] = requests;
  d["request_seconds"] = seconds;
  d["queued"] = queued;
  const std::pair<const char*, const Counter*> singles[] = {
      {"bytes_in", &s.bytes_in}, {"bytes_out", &s.bytes_out}, {"connections", &s.connections}, {"connections_opened", &s.connections_opened},
      {"connections_refused", &s.connections_refused}, {"connections_idle_closed", &s.connections_idle_closed},
      {"connections_cut", &s.connections_cut}, {"frames_malformed", &s.frames_malformed}, {"faults", &s.faults}, {"epoch_seen", &s.epoch_seen}};
  for (auto& [name, c] : singles) d[name] = c->load(std::memory_order_relaxed);
  d["inflight"] = shared.inflight.load();
  return d;
}

}  // namespace kv
