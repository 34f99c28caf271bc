// What gc asks of a store: which queues there are, what stands at their head, and why something is gone. evict() is in store_commit.cpp.
#include <algorithm>

#include "store_impl.hpp"

namespace kv {

// A queue is one class of one owner, of what was used again or was not. Totals are right once the start scan is over.
std::vector<std::pair<QueueId, QueueTotals>> StoreImpl::queues() {
  std::lock_guard commit(commit_mutex_);
  return {totals_.begin(), totals_.end()};
}

// The first `limit` rows of a queue in the order in which they go, past `after` if given.
std::vector<PeekedRow> StoreImpl::peek(const QueueId& queue, uint32_t limit, const RecencyKey* after) {
  std::vector<PeekedRow> out;
  with_index([&](Index& index) {
    Index::Reader reader(index);
    MDB_cursor* cursor = nullptr;
    if (int rc = mdb_cursor_open(reader.txn, index.recency, &cursor)) throw IndexFault("peek", rc);
    uint8_t prefix[1 + OWNER_BYTES];
    prefix[0] = queue.queue;
    std::memcpy(prefix + 1, queue.owner.data(), OWNER_BYTES);
    MDB_val key = after ? val(*after) : val(prefix, sizeof prefix), value;
    int rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
    if (rc == 0 && after && key.mv_size == RECENCY_KEY_BYTES && std::memcmp(key.mv_data, after->data(), RECENCY_KEY_BYTES) == 0)
      rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT);
    for (; rc == 0 && out.size() < limit; rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
      if (key.mv_size != RECENCY_KEY_BYTES || value.mv_size != sizeof(RecencyValue)) break;
      if (std::memcmp(key.mv_data, prefix, sizeof prefix) != 0) break;
      PeekedRow row;
      RecencyValue data;
      std::memcpy(row.row.data(), key.mv_data, RECENCY_KEY_BYTES);
      std::memcpy(&data, value.mv_data, sizeof data);
      if (recency_value(row.row, data.record_4k).check != data.check) {
        mdb_cursor_close(cursor);
        throw IndexFault("recency", MDB_CORRUPTED);
      }
      row.bytes = uint64_t(data.record_4k) * RECORD_ALIGN;
      out.push_back(row);
    }
    mdb_cursor_close(cursor);
    if (rc && rc != MDB_NOTFOUND) throw IndexFault("peek", rc);
  });
  return out;
}

uint64_t StoreImpl::wait_pressure(double timeout_seconds) {
  std::unique_lock lock(pressure_mutex_);
  const auto high = [this] { return wanted_bytes_ || used_bytes() > pressure_at_; };
  pressure_cv_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), high);
  const uint64_t wanted = std::exchange(wanted_bytes_, 0);
  return wanted ? wanted : used_bytes() > pressure_at_;
}

Usage StoreImpl::usage() {
  const auto positive = [](int64_t v) { return uint64_t(std::max<int64_t>(v, 0)); };
  return {used_bytes(), positive(freeing_bytes_), config_.capacity_bytes, positive(disk_free_), map_share_};
}

std::vector<std::pair<uint32_t, GhostRow>> StoreImpl::ghosts(const Owner& owner, const uint8_t* keys, uint32_t count) {
  std::vector<GroupKey> groups;
  for (uint32_t i = 0; i < count; i++) groups.push_back(group_key(owner, keys + size_t(i) * KEY_BYTES));
  return ghosts_->find(groups);
}

void StoreImpl::why(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) {
  const auto found = ghosts(owner, keys, count);
  const wire::WhyReply reply{uint32_t(found.size()), 0};
  out.resize(sizeof reply + found.size() * sizeof(wire::WhyGhost));
  std::memcpy(out.data(), &reply, sizeof reply);
  uint8_t* at = out.data() + sizeof reply;
  for (const auto& [ordinal, row] : found) {
    wire::WhyGhost ghost{ordinal, row.last_bucket, row.block_count, row.reason, row.retention_class, 0, {}};
    std::memcpy(ghost.tags, row.tags, sizeof ghost.tags);
    std::memcpy(at, &ghost, sizeof ghost);
    at += sizeof ghost;
  }
}

void StoreImpl::set_second_chance(bool on) {
  std::lock_guard lock(chances_mutex_);
  second_chance_ = on;
  if (!on) chances_.clear();
}

void StoreImpl::set_retentions(const std::array<uint32_t, CLASSES_MAX>& seconds) {
  for (uint32_t c = 0; c < CLASSES_MAX; c++) retention_[c] = seconds[c];
}

}  // namespace kv
