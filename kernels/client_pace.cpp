// LoadJob: how far ahead of what came a load by plane asks. See client_load.hpp.
//
// Who is asked for all planes at once sends them at once. Where nodes share a processor or a link, one of them then sends its last plane
// while another has not begun its first, and the first plane is whole when nearly all has come (docs/PERFORMANCE.md). So the next planes are
// asked for when little of those before is left to come.
//
// It goes on whatever nodes do. A pair (extent, plane) that was asked for completes, and then the bytes of k shards of it came; or its extent
// fails, and then all is asked for. And where nothing more comes for a moment, because of a disk or because a node is silent, the next plane is
// asked for, and from then on more is asked ahead: a third of what was asked (the later a plane, the more time it has), and at least what
// m of k + m nodes may owe.
#include <algorithm>

#include "client_load.hpp"

namespace kv::client {

namespace {
constexpr uint64_t AHEAD_BYTES = 256 << 10;         // more, and nodes that are done with a plane keep the processor from those that are not
constexpr uint64_t WAITING_AHEAD_BYTES = 4 << 20;   // at least, once something was waited for
constexpr uint64_t STEP_BYTES = 4 << 20;            // at least, to be asked for in one go: a READ more costs a node some 50 us
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
  const bool first = !pairs;   // compute waits for it longest: nothing beside it, for one more time to the nodes and back
  uint64_t granted = pairs ? ends_[pairs - 1] : 0, at = 0;
  while (pairs < all && settled_bytes_.load() >= at) {
    const uint64_t before = granted;
    do {
      pairs += extents;
      granted = ends_[pairs - 1];
    } while (pairs < all && granted - before < STEP_BYTES);
    at = granted - std::min(granted, was_still_ ? std::max({WAITING_AHEAD_BYTES, granted / 3, granted * m_ / (k_ + m_)}) : first ? 0 : AHEAD_BYTES);
  }
  grant(pairs);
  grant_at_ = pairs == all ? UINT64_MAX : at;
}

void LoadJob::grant_if_still(int64_t now) {
  if (granted_.load() >= ends_.size()) return;
  const uint64_t settled = settled_bytes_.load();
  if (!settled) return;   // connecting, or far away: asking for more brings nothing sooner
  if (settled != still_bytes_) {
    still_bytes_ = settled;
    still_since_ns_ = now;
  }
  if (now - still_since_ns_ < shared_->net->config.plane_wait_ns) return;
  still_since_ns_ = now;
  std::lock_guard lock(mutex_);
  was_still_ = true;
  grant_more();
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
