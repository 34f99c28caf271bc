// check_integrity(): every invariant of a running store, said as production code. bulk_index(): entries without bytes, for benchmarks.
#include <sys/stat.h>

#include <algorithm>
#include <deque>
#include <numeric>

#include "store_impl.hpp"

namespace kv {

std::string StoreImpl::start_reason() {
  std::lock_guard lock(stop_mutex_);
  return start_reason_;
}

std::string StoreImpl::last_fault() {
  std::lock_guard lock(fault_mutex_);
  return last_fault_;
}

// Problems found, as sentences; empty: sound. `deep`: every byte of every record as well. Holds up writers while it looks.
std::vector<std::string> StoreImpl::check_integrity(bool deep) {
  std::vector<std::string> problems;
  const auto say = [&](std::string text) {
    if (problems.size() < 100) problems.push_back(std::move(text));
  };
  if (!wait_started(60)) return {"the start scan did not end"};
  with_index([&](Index& index) {
    std::lock_guard commit(commit_mutex_);
    Index::Reader reader(index);
    std::map<uint32_t, std::vector<std::pair<uint64_t, uint64_t>>> places;   // segment -> (offset, end)
    std::map<QueueId, QueueTotals> totals;
    std::map<uint32_t, std::pair<int64_t, int64_t>> live;
    int64_t entries = 0, bytes = 0;
    MDB_val key, value;
    std::vector<uint64_t> words;
    int rc = mdb_cursor_get(reader.extents, &key, &value, MDB_FIRST);
    for (; rc == 0; rc = mdb_cursor_get(reader.extents, &key, &value, MDB_NEXT)) {
      Entry entry;
      std::vector<uint32_t> shard_bytes;
      const std::string at = "entry " + std::to_string(entries++);
      if (!decode_entry(key, value, entry) || !entry.shard_bytes(shard_bytes)) {
        say(at + ": value damaged");
        continue;
      }
      const EntryFixed& f = entry.fixed;
      const auto* name = static_cast<const uint8_t*>(key.mv_data);
      const RecencyKey row = recency_key(name, queue_of(f), f.bucket, f.start_block);
      MDB_val row_key = val(row), row_value;
      if (mdb_get(reader.txn, index.recency, &row_key, &row_value) != 0) say(at + ": no recency row");
      const QueueId queue{queue_of(f), owner_of_entry(name)};
      totals[queue].rows++;
      totals[queue].bytes += int64_t(entry.padded_bytes());
      bytes += int64_t(entry.padded_bytes());
      {
        std::shared_lock lock(filter_mutex_);
        if (filter_ && !filter_->maybe(CuckooFilter::hash(name))) say(at + ": the filter denies it");
      }
      if (f.segment == SEGMENT_SYNTHETIC) continue;
      const uint64_t offset = uint64_t(f.offset_4k) * RECORD_ALIGN;
      places[f.segment].emplace_back(offset, offset + entry.padded_bytes());
      live[f.segment].first++;
      live[f.segment].second += int64_t(entry.padded_bytes());
      const auto segment = segments_.find(f.segment);
      if (!segment || segment->hold() < 0) {
        say(at + ": its segment " + std::to_string(f.segment) + " is missing");
        continue;
      }
      struct stat st{};
      if (fstat(segment->fd(), &st) != 0 || offset + f.record_bytes > uint64_t(st.st_size)) say(at + ": lies beyond its segment's end");
      if (deep) {
        words.resize(f.record_bytes / 8 + 1);
        auto* record = reinterpret_cast<uint8_t*>(words.data());
        if (!SegmentFiles::read_all(segment->fd(), record, f.record_bytes, offset)) say(at + ": unreadable");
        else if (check_record(record, f.record_bytes) != Status::OK) say(at + ": a sum is wrong");
        else if (std::memcmp(entry_key_of(RecordView{record}).data(), name, ENTRY_KEY_BYTES) != 0)
          say(at + ": another record lies in its place");
      }
      segment->unhold();
    }
    if (rc != MDB_NOTFOUND) throw IndexFault("check", rc);
    MDB_stat recency{};
    mdb_stat(reader.txn, index.recency, &recency);
    if (int64_t(recency.ms_entries) != entries)
      say("recency has " + std::to_string(recency.ms_entries) + " rows for " + std::to_string(entries) + " entries");
    if (entries != entries_) say("counted " + std::to_string(entries_) + " entries, found " + std::to_string(entries));
    if (bytes != used_bytes_) say("counted " + std::to_string(used_bytes_) + " bytes, found " + std::to_string(bytes));
    for (const auto& [queue, t] : totals) {
      const auto it = totals_.find(queue);
      if (it == totals_.end() || it->second.rows != t.rows || it->second.bytes != t.bytes) say("totals of a queue are wrong");
    }
    if (totals.size() != totals_.size()) say("queues without rows");
    MDB_cursor* cursor = nullptr;
    if (mdb_cursor_open(reader.txn, index.freed, &cursor) == 0) {
      for (rc = mdb_cursor_get(cursor, &key, &value, MDB_FIRST); rc == 0; rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
        const auto* place = static_cast<const uint8_t*>(key.mv_data);
        uint32_t blocks;
        std::memcpy(&blocks, value.mv_data, 4);
        const uint64_t offset = uint64_t(load_be32(place + 4)) * RECORD_ALIGN;
        places[load_be32(place)].emplace_back(offset, offset + uint64_t(blocks) * RECORD_ALIGN);
      }
      mdb_cursor_close(cursor);
      if (rc != MDB_NOTFOUND) throw IndexFault("check", rc);
    }
    for (auto& [id, list] : places) {
      std::sort(list.begin(), list.end());
      for (size_t i = 1; i < list.size(); i++)
        if (list[i].first < list[i - 1].second) say("two places overlap in segment " + std::to_string(id));
    }
    for (const auto& segment : segments_.all()) {
      const auto it = live.find(segment->id);
      const auto [rows, row_bytes] = it == live.end() ? std::pair<int64_t, int64_t>{0, 0} : it->second;
      if (rows != segment->live_records || row_bytes != segment->live_bytes)
        say("live count of segment " + std::to_string(segment->id) + " is wrong");
    }
  });
  if (index_bad_) say("the index is damaged");
  return problems;
}

uint64_t StoreImpl::bulk_index(const Owner& owner, const uint8_t* keys, const uint64_t* write_ids, uint64_t count,
                               const SyntheticShape& shape) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t(0));
  const auto before = [&](uint64_t a, uint64_t b) { return std::memcmp(keys + a * KEY_BYTES, keys + b * KEY_BYTES, KEY_BYTES) < 0; };
  std::sort(order.begin(), order.end(), before);
  constexpr uint64_t BATCH = 2000;
  uint64_t stored = 0;
  for (uint64_t at = 0; at < count; at += BATCH) {
    std::deque<PutOp> ops;
    for (uint64_t i = at; i < std::min(count, at + BATCH); i++) {
      const uint8_t* extent_key = keys + order[i] * KEY_BYTES;
      PutOp& op = ops.emplace_back();
      op.key = entry_key(owner, extent_key, write_ids[order[i]], shape.shard);
      std::vector<uint64_t> words(RECORD_ALIGN / 8);
      auto* head = reinterpret_cast<RecordHead*>(words.data());
      head->k = shape.k, head->m = shape.m, head->shard = shape.shard;
      head->plane_count = 1;
      head->block_count = uint16_t(shape.block_count);
      head->block_bytes = shape.block_bytes;
      head->start_block = shape.start_block;
      head->retention_class = shape.retention_class;
      const uint32_t shard_bytes = shard_bytes_of(shape.block_bytes, shape.k);
      auto* plane = reinterpret_cast<PlaneEntry*>(head + 1);
      *plane = {shape.block_bytes, shard_bytes};
      head->head_bytes = head_bytes_of(1, 0, shape.block_count);
      head->record_bytes = head->head_bytes + checks_bytes_of(1, shape.block_count) + uint64_t(shard_bytes) * shape.block_count;
      const RecordView view{reinterpret_cast<const uint8_t*>(words.data())};
      for (uint32_t b = 0; b < shape.block_count; b++) {
        const uint64_t tag = b ? XXH3_64bits_withSeed(extent_key, KEY_BYTES, b) : block_tag(extent_key);
        std::memcpy(reinterpret_cast<uint8_t*>(words.data()) + head->head_bytes - 8 * (shape.block_count - b), &tag, 8);
      }
      op.recency = recency_key(op.key.data(), shape.retention_class, shape.bucket, shape.start_block);
      op.value = encode_entry(op.key, view, SEGMENT_SYNTHETIC, 0, shape.bucket);
    }
    std::vector<PutOp*> batch;
    for (PutOp& op : ops) batch.push_back(&op);
    with_index([&](Index&) {
      std::lock_guard commit(commit_mutex_);
      const bool strict = std::exchange(config_.strict_sync, false);
      commit_batch(batch);
      config_.strict_sync = strict;
    });
    for (const PutOp& op : ops) stored += op.status == Status::OK;
  }
  return stored;
}

std::vector<std::pair<std::string, uint64_t>> StoreImpl::stats() {
  std::vector<std::pair<std::string, uint64_t>> out;
  const auto add = [&](const char* name, uint64_t v) { out.emplace_back(name, v); };
  const auto positive = [](int64_t v) { return uint64_t(std::max<int64_t>(v, 0)); };
  add("used_bytes", used_bytes());
  add("parity_bytes", positive(parity_bytes_));
  add("freeing_bytes", positive(freeing_bytes_));
  add("writing_bytes", positive(writing_bytes_));
  add("zombie_bytes", zombie_bytes_);
  add("capacity_bytes", config_.capacity_bytes);
  add("disk_free_bytes", positive(disk_free_));
  add("segments", segments_.count());
  {
    std::lock_guard commit(commit_mutex_);
    add("entries", positive(entries_));
    add("queues", totals_.size());
  }
  with_index([&](Index& index) {
    add("index_bytes", index.bytes_used(Index::Reader(index).txn));
    struct stat st{};
    if (stat((config_.dir + "/index/data.mdb").c_str(), &st) == 0) add("index_file_bytes", uint64_t(st.st_blocks) * 512);
  });
  {
    std::shared_lock lock(filter_mutex_);
    add("filter_bytes", filter_ ? filter_->bytes() : 0);
    add("filter_keys", filter_ ? filter_->count() : 0);
  }
  add("pins", pins_.live(now_seconds()));
  add("touches_waiting", touches_.size());
  add("ghost_bytes", ghosts_->bytes());
  add("ghosts_dropped", ghosts_->dropped());
  add("bucket", bucket_now());
  add("start_scan_ms", start_ms_);
  {
    std::lock_guard lock(stop_mutex_);
    add("started", started_);
  }
  const Counters& c = counters_;
  add("puts_total", c.puts);
  add("put_bytes_total", c.put_bytes);
  add("puts_existing_total", c.puts_existing);
  add("puts_no_space_total", c.puts_no_space);
  add("puts_refused_total", c.puts_refused);
  add("puts_corrupt_total", c.puts_corrupt);
  add("discover_keys_total", c.discover_keys);
  add("discover_filtered_total", c.discover_filtered);
  add("discover_writings_total", c.discover_writings);
  add("promises_total", c.promises);
  add("promises_held_total", c.promises_held);
  add("promises_busy_total", c.promises_busy);
  add("touches_dropped_total", c.touches_dropped);
  add("reads_total", c.reads);
  add("reads_absent_total", c.reads_absent);
  add("withdrawn_total", c.withdrawn);
  add("corrupt_reported_total", c.corrupt_reported);
  add("corrupt_found_total", c.corrupt_found);
  add("suspects_waiting", suspects_.waiting());
  add("suspects_damaged_total", c.suspects_damaged);
  add("suspects_unfounded_total", c.suspects_unfounded);
  add("suspects_absent_total", c.suspects_absent);
  add("suspects_refused_total", c.suspects_refused);
  add("scrubbed_bytes_total", c.scrubbed_bytes);
  add("index_faults_total", c.index_faults);
  add("evicted_total", c.evicted);
  add("votes_yes_total", c.votes[size_t(Vote::YES)]);
  add("votes_unseen_total", c.votes[size_t(Vote::UNSEEN)]);
  add("votes_budget_total", c.votes[size_t(Vote::BUDGET)]);
  add("evict_skipped_total", c.evict_skipped);
  add("punches_total", c.punches);
  add("punched_bytes_total", c.punched_bytes);
  add("punch_errors_total", c.punch_errors);
  add("segments_removed_total", c.segments_removed);
  add("io_errors_total", c.io_errors);
  add("orphan_bytes_freed_total", c.orphan_bytes);
  add("recovered_total", c.recovered);
  add("recovery_dropped_total", c.recovery_dropped);
  add("unknown_versions_total", c.unknown_versions);
  return out;
}

}  // namespace kv
