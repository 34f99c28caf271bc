// LoadJob: how far ahead of what came a load by plane asks. See client_load.hpp.
//
// Who is asked for all planes at once sends them at once. Where nodes share a processor or a link, one of them then sends its last plane
// while another has not begun its first, and the first plane is whole when nearly all has come (docs/PERFORMANCE.md). So the next planes are
// asked for when little of those before is left to come.
//
// It goes on whatever nodes do. A pair (extent, plane) that was asked for completes, and then the bytes of k shards of it came; or its extent
// fails, and then all is asked for. And m of k + m nodes hold nobody up while the others turn to parity: what they may owe counts as little.
// The later a plane, the more may be due before it: it has more time, and disk, wire and client work at once only on what was asked for.
#include <algorithm>

#include "client_load.hpp"

namespace kv::client {

namespace {
constexpr uint64_t AHEAD_BYTES = 4 << 20;   // always: two client threads take that in a millisecond
constexpr uint64_t STEP_BYTES = 4 << 20;    // at least, to be asked for in one go: a READ more costs a node some 50 us
}  // namespace

// Leading items of the stream that may be asked for, `from` of them for sure.
uint32_t LoadJob::may_ask(const Stream& stream, uint32_t from) const {
  while (from < stream.items.size() && is_granted(stream.items[from])) from++;
  return from;
}

void LoadJob::settle(Stream& stream, uint32_t end) {
  if (ends_.empty()) return;
  uint64_t bytes = 0;
  for (; stream.settled < end; stream.settled++) bytes += body_bytes(stream.items[stream.settled]);
  if (settled_bytes_.fetch_add(bytes) + bytes < grant_at_.load()) return;
  std::lock_guard lock(mutex_);
  if (settled_bytes_.load() >= grant_at_.load()) grant_more();
}

void LoadJob::grant_more() {
  const uint32_t all = uint32_t(ends_.size()), extents = uint32_t(plan_.extents.size());
  uint32_t pairs = granted_.load();
  uint64_t granted = pairs ? ends_[pairs - 1] : 0, at = 0;
  while (pairs < all && settled_bytes_.load() >= at) {
    const uint64_t before = granted;
    do {
      pairs += extents;
      granted = ends_[pairs - 1];
    } while (pairs < all && granted - before < STEP_BYTES);
    at = granted - std::min(granted, std::max({AHEAD_BYTES, granted / 3, granted * m_ / (k_ + m_)}));
  }
  grant(pairs);
  grant_at_ = pairs == all ? UINT64_MAX : at;
}

void LoadJob::grant(uint32_t pairs) {
  granted_ = pairs;
  using Going = std::pair<std::shared_ptr<ReadConn>, std::shared_ptr<Stream>>;
  std::unordered_map<Loop*, std::vector<Going>> by_loop;
  for (size_t i = 0; i < conns_.size(); i++)
    if (conns_[i]) by_loop[&conns_[i]->loop].emplace_back(conns_[i], streams_[i]);   // one that has not begun sees `granted_` itself
  for (auto& [loop, going] : by_loop)
    loop->post([going = std::move(going)] {
      for (auto& [conn, stream] : going) conn->go_on(stream);
    });
}

}  // namespace kv::client
