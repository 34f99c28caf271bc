// Every change of the index, and what follows from it in RAM. All of it under commit_mutex_.
#include <unistd.h>

#include <algorithm>
#include <set>

#include "store_impl.hpp"

namespace kv {

namespace {

constexpr size_t TOUCHES_PER_COMMIT = 512;   // ~10 us each, so about 5 ms under the mutex

// Aborts unless committed: an exception on the way leaves no transaction open.
class WriteTxn {
 public:
  explicit WriteTxn(Index& index) : txn(index.begin_write()) {}
  ~WriteTxn() {
    if (txn) mdb_txn_abort(txn);
  }
  WriteTxn(const WriteTxn&) = delete;
  WriteTxn& operator=(const WriteTxn&) = delete;
  int commit() { return mdb_txn_commit(std::exchange(txn, nullptr)); }
  MDB_cursor* cursor(MDB_dbi dbi) {
    MDB_cursor* c = nullptr;
    if (int rc = mdb_cursor_open(txn, dbi, &c)) throw IndexFault("cursor", rc);
    return c;
  }
  MDB_txn* txn;
};

}  // namespace

// Threads that commit side by side share: whoever gets the mutex first commits for all that wait.
void StoreImpl::commit(Puts& puts) {
  for (auto& put : puts) put->status = Status::BUSY;   // where there is no index now
  with_index([&](Index&) {
    {
      std::lock_guard lock(queue_mutex_);
      queue_.reserve(queue_.size() + puts.size());   // all or none
      for (auto& put : puts) queue_.push_back(static_cast<PutOp*>(put.get()));
    }
    std::lock_guard commit(commit_mutex_);
    std::vector<PutOp*> batch;
    {
      std::lock_guard lock(queue_mutex_);
      if (std::ranges::all_of(puts, [](auto& put) { return static_cast<PutOp&>(*put).committed; })) return;
      batch.swap(queue_);
    }
    for (PutOp* each : batch) each->committed = true;
    commit_batch(batch);
  });
  for (auto& put : puts) settle(static_cast<PutOp&>(*put));
}

// Counts it, and lets go of its place. Bytes that nobody owns go before the segment can be sealed.
void StoreImpl::settle(PutOp& op) {
  op.of = nullptr;
  const uint64_t padded = op.padded_bytes();
  if (op.segment) {
    if (op.status != Status::OK && SegmentFiles::punch(op.segment->fd(), op.offset, padded) != 0) counters_.punch_errors++;
    segments_.release(*op.segment, op.offset, op.status == Status::OK);
  }
  writing_bytes_ -= int64_t(padded);
  switch (op.status) {
    case Status::OK:
      counters_.puts++;
      counters_.put_bytes += op.record_bytes;
      spend(padded);
      disk_free_ -= int64_t(padded);
      if (used_bytes() > pressure_at_) poke_pressure(0);
      break;
    case Status::NO_SPACE:
      counters_.puts_no_space++;
      poke_pressure(padded);
      break;
    case Status::EXISTS: counters_.puts_existing++; break;
    case Status::IO_ERROR: counters_.io_errors++; break;
    default: counters_.puts_refused++;
  }
}

void StoreImpl::commit_batch(std::vector<PutOp*>& batch) {
  if (config_.strict_sync) {
    std::set<Segment*> files;
    for (const PutOp* op : batch) files.insert(op->segment.get());
    for (Segment* file : files)
      if (fdatasync(file->fd()) != 0) {
        for (PutOp* op : batch) op->status = Status::IO_ERROR;
        return;
      }
  }
  std::vector<const PutOp*> stored;
  std::vector<const uint8_t*> filtered;
  const auto undo = [&](Status status) {
    for (const uint8_t* key : filtered) filter_erase(key);
    for (PutOp* op : batch) op->status = status;
  };
  try {
    WriteTxn txn(*index_);
    MDB_cursor* cursor = txn.cursor(index_->extents);
    for (PutOp* op : batch) {
      bool first_of_group = false;
      op->status = insert_entry(txn.txn, cursor, *op, first_of_group);
      if (op->status == Status::NO_SPACE) {
        mdb_cursor_close(cursor);
        return undo(Status::NO_SPACE);   // the transaction is broken for all of them
      }
      if (op->status != Status::OK) continue;
      stored.push_back(op);
      if (first_of_group) {
        filter_insert(op->key.data());   // before the commit: the filter never says "no" to what a reader can see
        filtered.push_back(op->key.data());
      }
    }
    mdb_cursor_close(cursor);
    map_share_ = index_->map_share(txn.txn);
    if (int rc = txn.commit()) {
      undo(out_of_space(rc) ? Status::NO_SPACE : Status::IO_ERROR);
      if (!out_of_space(rc)) throw IndexFault("commit", rc);
      return;
    }
  } catch (const IndexFault&) {
    undo(Status::IO_ERROR);
    throw;
  }
  if (config_.strict_sync) index_->sync();
  for (const PutOp* op : stored) {
    EntryFixed fixed;
    std::memcpy(&fixed, op->value.data(), sizeof fixed);
    account(op->key, fixed, +1);
    pins_.forget(name_of_entry(op->key));
  }
}

Status StoreImpl::insert_entry(MDB_txn* txn, MDB_cursor* cursor, const PutOp& op, bool& first_of_group) {
  if (tombstones_.has(name_of_entry(op.key), now_seconds())) return Status::TOMBSTONED;
  uint32_t writings = 0;
  bool same_writing = false;
  uint8_t last[8];
  MDB_val key = {GROUP_BYTES, const_cast<uint8_t*>(op.key.data())}, value;
  int rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
  for (; rc == 0 && has_prefix(key, op.key.data(), GROUP_BYTES); rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
    const auto* at = static_cast<const uint8_t*>(key.mv_data);
    if (std::memcmp(at, op.key.data(), ENTRY_KEY_BYTES) == 0) return Status::EXISTS;
    if (std::memcmp(at, op.key.data(), NAME_BYTES) == 0) same_writing = true;
    if (!writings || std::memcmp(last, at + GROUP_BYTES, 8) != 0) writings++;
    std::memcpy(last, at + GROUP_BYTES, 8);
  }
  if (rc && rc != MDB_NOTFOUND) throw IndexFault("put", rc);
  if (!same_writing && writings >= WRITINGS_MAX) return Status::TOO_MANY_WRITINGS;
  first_of_group = writings == 0;
  EntryFixed fixed;
  std::memcpy(&fixed, op.value.data(), sizeof fixed);
  const RecencyValue recency = recency_value(op.recency, uint32_t(align_up(fixed.record_bytes, RECORD_ALIGN) / RECORD_ALIGN));
  MDB_val entry_row = val(op.key), entry_value = val(op.value), recency_row = val(op.recency), recency_data = val(&recency, sizeof recency);
  rc = mdb_put(txn, index_->extents, &entry_row, &entry_value, 0);
  if (!rc) rc = mdb_put(txn, index_->recency, &recency_row, &recency_data, 0);
  if (out_of_space(rc)) return Status::NO_SPACE;
  if (rc) throw IndexFault("put", rc);
  return Status::OK;
}

// In `txn`: the entry and its recency row go, its place is noted as free.
void StoreImpl::remove_entry(MDB_txn* txn, const EntryKey& key, const Entry& entry, GhostReason reason, std::vector<Removed>& removed) {
  const EntryFixed fixed = entry.fixed;   // the entry points into the page that is about to change
  GroupKey group;
  std::memcpy(group.data(), key.data(), GROUP_BYTES);
  const GhostRow ghost = Ghosts::row_of(group, fixed, entry.tags, reason);
  const RecencyKey recency = recency_key(key.data(), queue_of(fixed), fixed.bucket, fixed.start_block);
  MDB_val row = val(key), recency_row = val(recency);
  int rc = mdb_del(txn, index_->extents, &row, nullptr);
  if (!rc) {
    rc = mdb_del(txn, index_->recency, &recency_row, nullptr);
    if (rc == MDB_NOTFOUND) rc = MDB_CORRUPTED;
  }
  if (!rc && fixed.segment != SEGMENT_SYNTHETIC) {
    uint8_t place[8];
    store_be32(place, fixed.segment);
    store_be32(place + 4, fixed.offset_4k);
    const uint32_t blocks = uint32_t(align_up(fixed.record_bytes, RECORD_ALIGN) / RECORD_ALIGN);
    MDB_val free_row = val(place, sizeof place), free_value = val(&blocks, sizeof blocks);
    rc = mdb_put(txn, index_->freed, &free_row, &free_value, 0);
  }
  if (rc) throw IndexFault("delete", rc);
  MDB_cursor* cursor = nullptr;
  if (int failed = mdb_cursor_open(txn, index_->extents, &cursor)) throw IndexFault("cursor", failed);
  const auto any = [&](size_t bytes) {
    MDB_val next = {bytes, const_cast<uint8_t*>(key.data())}, ignored;
    return mdb_cursor_get(cursor, &next, &ignored, MDB_SET_RANGE) == 0 && has_prefix(next, key.data(), bytes);
  };
  const bool last_of_group = !any(GROUP_BYTES);
  removed.push_back({key, fixed, last_of_group, last_of_group || !any(NAME_BYTES), ghost, 0});
  mdb_cursor_close(cursor);
}

// Commits and takes the consequences.
bool StoreImpl::commit_removals(MDB_txn* txn, const std::vector<Removed>& removed) {
  if (int rc = mdb_txn_commit(txn)) {
    if (out_of_space(rc)) return false;
    throw IndexFault("commit", rc);
  }
  if (config_.strict_sync) index_->sync();
  deletes_++;
  const uint64_t epoch = epoch_, now = boottime_ms();
  std::vector<GhostRow> gone;
  for (const Removed& r : removed) {
    account(r.key, r.fixed, -1);
    if (r.last_of_group) filter_erase(r.key.data());
    if (r.last_of_name) gone.push_back(r.ghost);
    if (r.fixed.segment == SEGMENT_SYNTHETIC) continue;
    const uint32_t blocks = uint32_t(align_up(r.fixed.record_bytes, RECORD_ALIGN) / RECORD_ALIGN);
    freeing_bytes_ += int64_t(blocks) * RECORD_ALIGN;
    std::lock_guard lock(limbo_mutex_);
    limbo_.push_back({r.fixed.segment, r.fixed.offset_4k, blocks, epoch, now});
  }
  ghosts_->add(gone, day_now());
  return true;
}

// Removes, in one transaction, all entries whose key begins with one of `prefixes`, pinned or not; counts[i] says how many went.
// False: no space to delete in; nothing happened.
bool StoreImpl::remove_all(const std::vector<Prefix>& prefixes, GhostReason reason, std::vector<uint32_t>& counts) {
  std::lock_guard commit(commit_mutex_);
  counts.assign(prefixes.size(), 0);
  for (const Prefix& p : prefixes) pins_.begin_delete(name_of_entry(p.from), now_seconds(), true);
  const auto end = [&] {
    for (const Prefix& p : prefixes) pins_.end_delete(name_of_entry(p.from));
  };
  bool room = true;
  try {
    std::vector<Removed> removed;
    WriteTxn txn(*index_);
    for (size_t i = 0; i < prefixes.size(); i++)
      for (;; counts[i]++) {
        MDB_cursor* cursor = txn.cursor(index_->extents);
        MDB_val key = {prefixes[i].bytes, const_cast<uint8_t*>(prefixes[i].from.data())}, value;
        const int rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
        mdb_cursor_close(cursor);
        if (rc && rc != MDB_NOTFOUND) throw IndexFault("delete", rc);
        if (rc || !has_prefix(key, prefixes[i].from.data(), prefixes[i].bytes)) break;
        Entry entry;
        if (!decode_entry(key, value, entry)) throw IndexFault("value", MDB_CORRUPTED);
        EntryKey found;
        std::memcpy(found.data(), key.mv_data, ENTRY_KEY_BYTES);
        remove_entry(txn.txn, found, entry, reason, removed);
      }
    if (!removed.empty()) room = commit_removals(std::exchange(txn.txn, nullptr), removed);
  } catch (const IndexFault& why) {
    end();
    if (!out_of_space(why.code)) throw;
    return false;
  }
  end();
  return room;
}

// A shard whose bytes are bad or gone.
bool StoreImpl::drop_corrupt(const EntryKey& key) {
  bool dropped = false;
  with_index([&](Index&) {
    std::vector<uint32_t> counts;
    dropped = remove_all({{key, ENTRY_KEY_BYTES}}, GhostReason::CORRUPT, counts) && counts[0];
  });
  counters_.corrupt_found += dropped;
  return dropped;
}

std::vector<Evicted> StoreImpl::evict(const std::vector<RecencyKey>& rows, GhostReason reason) {
  size_t batch = 64;   // about 1 ms under the mutex: puts wait no longer than that
  std::vector<Evicted> out;
  for (size_t at = 0; at < rows.size();) {
    std::vector<Removed> removed;
    std::vector<NameKey> dying;
    bool full = false;
    const bool looked = with_index([&](Index& index) {
      std::lock_guard commit(commit_mutex_);
      const uint32_t now = now_seconds();
      try {
        WriteTxn txn(index);
        for (size_t i = at; i < std::min(rows.size(), at + batch); i++) {
          const EntryKey key = entry_key_of_recency(rows[i].data());
          MDB_val row = val(key), value;
          const int rc = mdb_get(txn.txn, index.extents, &row, &value);
          if (rc && rc != MDB_NOTFOUND) throw IndexFault("evict", rc);
          if (rc) continue;   // gone already
          Entry entry;
          if (!decode_entry(row, value, entry)) throw IndexFault("value", MDB_CORRUPTED);
          const RecencyKey now_row = recency_key(key.data(), queue_of(entry.fixed), entry.fixed.bucket, entry.fixed.start_block);
          const NameKey name = name_of_entry(key);
          // Last use is read again here, in the deleting transaction: what was touched or promised since the peek stays.
          if (now_row != rows[i] || touches_.waiting(name) || !pins_.begin_delete(name, now, false)) {
            counters_.evict_skipped++;
            continue;
          }
          dying.push_back(name);
          remove_entry(txn.txn, key, entry, reason, removed);
          removed.back().row = i;
        }
        if (!removed.empty() && !commit_removals(std::exchange(txn.txn, nullptr), removed)) full = true;
      } catch (const IndexFault& why) {
        for (const NameKey& name : dying) pins_.end_delete(name);
        if (!out_of_space(why.code)) throw;
        full = true;
        dying.clear();
      }
      for (const NameKey& name : dying) pins_.end_delete(name);
    });
    if (!looked || (full && batch == 1)) break;
    if (full) {
      batch /= 4;   // copy on write: a smaller transaction needs fewer free pages
      continue;
    }
    at += batch;
    const uint32_t bucket = bucket_now();
    uint64_t rows_held;
    {
      std::lock_guard commit(commit_mutex_);
      rows_held = uint64_t(std::max<int64_t>(entries_, 0));
    }
    for (const Removed& r : removed)
      out.push_back({r.row, r.fixed.retention_class, align_up(r.fixed.record_bytes, RECORD_ALIGN),
                     bucket > r.fixed.bucket ? uint64_t(bucket - r.fixed.bucket) * config_.bucket_seconds : 0});
    if (reason == GhostReason::EVICTED) {
      std::lock_guard lock(chances_mutex_);
      for (const Removed& r : removed) {
        if (!second_chance_ || r.fixed.reused) continue;
        chances_.add(CuckooFilter::hash(r.key.data()));
        // As many as the store holds: all twelve nodes of an extent forget it at about the same time.
        if (chances_.count() >= std::clamp(rows_held, uint64_t(1024), chances_.keys_max())) chances_.rotate();
      }
    }
    counters_.evicted += removed.size();
  }
  return out;
}

// Last uses of the past second, a short transaction at a time. Puts and evictions go between them; a touch counts as waiting until done.
void StoreImpl::flush_touches() {
  bool more = true;
  while (more && with_index([&](Index& index) {
    std::lock_guard commit(commit_mutex_);
    const std::vector<std::pair<NameKey, Touch>> touches = touches_.some(TOUCHES_PER_COMMIT);
    more = touches.size() == TOUCHES_PER_COMMIT;
    apply_touches(index, touches);
    touches_.done(touches);
  })) {
  }
}

// A touch moves a bucket up only, and a class to the longer-lived.
void StoreImpl::apply_touches(Index& index, const std::vector<std::pair<NameKey, Touch>>& touches) {
  if (touches.empty()) return;
  struct Moved { EntryKey key; EntryFixed before, after; };
  std::vector<Moved> moved;
  try {
    WriteTxn txn(index);
    MDB_cursor* cursor = txn.cursor(index.extents);
    for (const auto& [name, touch] : touches) {
      MDB_val key = val(name), value;
      int rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
      for (; rc == 0 && has_prefix(key, name.data(), NAME_BYTES); rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
        Entry entry;
        if (!decode_entry(key, value, entry)) throw IndexFault("value", MDB_CORRUPTED);
        const EntryFixed before = entry.fixed;
        const uint32_t bucket = std::max(before.bucket, touch.bucket);
        const uint8_t retention = longer(touch.retention_class, before.retention_class) ? touch.retention_class : before.retention_class;
        if (bucket == before.bucket && retention == before.retention_class) continue;
        EntryKey found;
        std::memcpy(found.data(), key.mv_data, ENTRY_KEY_BYTES);
        const bool reused = before.reused || bucket > before.bucket;
        std::vector<uint8_t> changed = with_last_use(found, value, bucket, retention, reused);
        MDB_val row = val(found), data = val(changed);
        rc = mdb_cursor_put(cursor, &row, &data, MDB_CURRENT);
        const RecencyKey old_row = recency_key(found.data(), queue_of(before), before.bucket, before.start_block);
        const RecencyKey new_row = recency_key(found.data(), queue_of(retention, reused), bucket, before.start_block);
        const RecencyValue recency = recency_value(new_row, entry.padded_4k());
        MDB_val old_key = val(old_row), new_key = val(new_row), new_value = val(&recency, sizeof recency);
        if (!rc) rc = mdb_del(txn.txn, index.recency, &old_key, nullptr);
        if (rc == MDB_NOTFOUND) rc = MDB_CORRUPTED;
        if (!rc) rc = mdb_put(txn.txn, index.recency, &new_key, &new_value, 0);
        if (rc) throw IndexFault("touch", rc);
        EntryFixed after = before;
        after.bucket = bucket, after.retention_class = retention, after.reused = reused;
        moved.push_back({found, before, after});
      }
      if (rc && rc != MDB_NOTFOUND) throw IndexFault("touch", rc);
    }
    mdb_cursor_close(cursor);
    if (int rc = txn.commit()) throw IndexFault("touch", rc);
  } catch (const IndexFault& why) {
    if (!out_of_space(why.code)) throw;
    counters_.touches_dropped += touches.size();
    return;
  }
  if (config_.strict_sync) index.sync();
  for (const Moved& m : moved)
    if (queue_of(m.before) != queue_of(m.after)) {
      account(m.key, m.before, -1);
      account(m.key, m.after, +1);
    }
}

bool StoreImpl::in_totals(const uint8_t* key) const {
  return totals_ready_ || (scanning_ && scanning_totals_ && scan_begun_ && std::memcmp(key, scan_at_.data(), GROUP_BYTES) <= 0);
}

void StoreImpl::account(const EntryKey& key, const EntryFixed& fixed, int sign) {
  const int64_t bytes = sign * int64_t(align_up(fixed.record_bytes, RECORD_ALIGN));
  used_bytes_ += bytes;
  if (!in_totals(key.data())) return;   // the start scan has not come by yet and will see it
  entries_ += sign;
  const QueueId queue{queue_of(fixed), owner_of_entry(key.data())};
  QueueTotals& totals = totals_[queue];
  totals.rows += sign;
  totals.bytes += bytes;
  if (key.back() >= fixed.k) parity_bytes_ += bytes;
  if (totals.rows == 0) totals_.erase(queue);
  if (fixed.segment == SEGMENT_SYNTHETIC) return;
  if (const auto segment = segments_.find(fixed.segment)) {
    segment->live_bytes += bytes;
    segment->live_records += sign;
    if (sign < 0 && segment->live_records == 0) empty_segments_.push_back(segment->id);
  }
}

void StoreImpl::filter_insert(const uint8_t* key) {
  const uint64_t h = CuckooFilter::hash(key);
  {
    std::lock_guard lock(filter_mutex_);
    if (filter_) filter_->insert(h);
  }
  if (scanning_ && scan_begun_ && std::memcmp(key, scan_at_.data(), GROUP_BYTES) <= 0) scan_filter_->insert(h);
}

void StoreImpl::filter_erase(const uint8_t* key) {
  const uint64_t h = CuckooFilter::hash(key);
  {
    std::lock_guard lock(filter_mutex_);
    if (filter_) filter_->erase(h);
  }
  if (scanning_ && scan_begun_ && std::memcmp(key, scan_at_.data(), GROUP_BYTES) <= 0) scan_filter_->erase(h);
}

}  // namespace kv
