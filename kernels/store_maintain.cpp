// What happens without being asked: touches into the index, syncs, footers, holes, a larger filter, a new index for a damaged one.
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "priority.hpp"
#include "store_impl.hpp"

namespace kv {

namespace {

constexpr uint32_t TICK_MS = 50;
constexpr uint32_t PUNCH_MS = 10, PUNCH_MS_BEHIND = 40;   // of a tick; a punch takes 0.2 ms, under load 1.8 ms
constexpr size_t PUNCH_LOOK = 8192;                // places looked at in one tick, the longest free first
constexpr uint64_t PUNCH_AFTER_MS = 1000;          // neighbours that follow are merged, a segment that empties is unlinked whole
constexpr uint32_t FOOTERS_PER_LOOK = 1024;
constexpr uint64_t ZOMBIES_EVERY_MS = 10000;       // one stat a segment: 60,000 of a 15 TB disk take 60 ms
constexpr uint64_t PUNCH_BYTES_MAX = 16u << 20;    // of one hole: a read of the same file waits for it

}  // namespace

bool StoreImpl::pause(uint32_t ms) {
  std::unique_lock lock(stop_mutex_);
  if (!stopping_) stop_cv_.wait_for(lock, std::chrono::milliseconds(ms));
  return !stopping_;
}

void StoreImpl::look_at_disk() {
  struct statvfs fs{};
  if (statvfs(config_.dir.c_str(), &fs) == 0) disk_free_ = int64_t(fs.f_bavail) * int64_t(fs.f_frsize);
}

// Bytes that nothing accounts for: left by a crash or a failed punch, or a fault of ours. Called while nothing is punched.
void StoreImpl::look_for_zombies() {
  const auto owned = [&] {
    std::lock_guard commit(commit_mutex_);
    return used_bytes_ + freeing_bytes_ + writing_bytes_ + int64_t(segments_.ahead_bytes());
  };
  const int64_t before = owned();
  int64_t allocated = 0;
  uint32_t opened = 0;
  for (const auto& segment : segments_.all()) {
    struct stat st{};
    if (stat(segment->path.c_str(), &st) != 0) continue;
    allocated += int64_t(st.st_blocks) * 512;
    if (!segment->sealed) continue;
    if (!segment->footer_on_disk) {
      FooterTrailer trailer{};
      if (++opened > FOOTERS_PER_LOOK) return;   // after a start with many: the next look goes on
      if (segment->hold() < 0) continue;
      if (SegmentFiles::read_all(segment->fd(), reinterpret_cast<uint8_t*>(&trailer), sizeof trailer, uint64_t(st.st_size) - sizeof trailer))
        segment->footer_on_disk = trailer.footer_bytes;
      segment->unhold();
    }
    allocated -= int64_t(segment->footer_on_disk);
  }
  zombie_bytes_ = uint64_t(std::max<int64_t>(allocated - std::max(before, owned()), 0));
}

void StoreImpl::run_maintenance() {
  give_way_to_loads();
  uint64_t last_second = 0, last_purge = 0, last_zombies = 0;
  while (pause(TICK_MS)) {
    if (index_bad_) replace_index();
    {
      std::lock_guard one(free_mutex_);
      advance_epoch();
    }
    const uint64_t now = boottime_ms();
    if (now - last_second >= 1000) {
      last_second = now;
      look_at_disk();
      with_index([&](Index& index) { map_share_ = index.map_share(Index::Reader(index).txn); });
      flush_touches();
      if (now - last_purge >= 10000) {
        last_purge = now;
        tombstones_.purge(now_seconds());
      }
      bool grow;
      {
        std::lock_guard lock(stop_mutex_);
        grow = started_;
      }
      {
        std::shared_lock lock(filter_mutex_);
        grow = grow && filter_ && filter_->full();
      }
      if (grow) scan_index(false, nullptr);
    }
    std::lock_guard one(free_mutex_);
    remove_empty_segments();
    if (now - last_zombies >= ZOMBIES_EVERY_MS) {
      last_zombies = now;
      std::unique_lock lock(stop_mutex_);
      const bool started = started_;
      lock.unlock();
      if (started) look_for_zombies();
    }
    const bool behind = config_.capacity_bytes && freeing_bytes_ > int64_t(config_.capacity_bytes / 32);
    punch_some(behind ? PUNCH_MS_BEHIND : PUNCH_MS, PUNCH_LOOK, behind ? 0 : PUNCH_AFTER_MS);
  }
}

void StoreImpl::run_sync() {
  give_way_to_loads();
  while (pause(1000)) {
    sync_data();
    segments_.give_back_ahead();
    with_index([&](Index& index) { index.sync(); });
    for (const auto& segment : segments_.to_seal()) {
      {
        std::lock_guard lock(stop_mutex_);
        if (stopping_) return;
        if (!started_) break;   // the start scan may be at work on it
      }
      if (segments_.seal(segment) != Status::OK) counters_.io_errors++;
      std::lock_guard commit(commit_mutex_);
      if (segment->live_records == 0) empty_segments_.push_back(segment->id);
    }
  }
}

void StoreImpl::sync_data() {
  for (const auto& segment : segments_.dirty()) {
    if (segment->hold() < 0) continue;
    segment->dirty = false;
    if (fdatasync(segment->fd()) != 0) counters_.io_errors++;
    segment->unhold();
  }
}

// Two slots: the epoch moves on when nobody is left in the slot that it is about to reuse.
void StoreImpl::advance_epoch() {
  const uint64_t now = epoch_;
  if (in_epoch_[(now + 1) & 1] == 0) epoch_ = now + 1;
}

// Punches for at most `ms_max`, of the first `look` places in limbo those that are `after_ms` old.
void StoreImpl::punch_some(uint64_t ms_max, size_t look, uint64_t after_ms) {
  const uint64_t now = boottime_ms(), epoch = epoch_;
  std::vector<Freed> ready;
  {
    std::lock_guard lock(limbo_mutex_);
    for (const Freed& f : limbo_) {
      if (ready.size() == look) break;
      if (f.epoch + 2 <= epoch && now - f.since_ms >= after_ms) ready.push_back(f);
    }
  }
  if (ready.empty()) return;
  const auto place = [](const Freed& f) { return std::pair(f.segment, f.offset_4k); };
  const auto before = [&](const Freed& a, const Freed& b) { return place(a) < place(b); };
  std::sort(ready.begin(), ready.end(), before);
  std::vector<Freed> punched;
  for (size_t i = 0; i < ready.size() && boottime_ms() - now <= ms_max;) {
    const auto segment = segments_.find(ready[i].segment);
    if (!segment || segment->hold() < 0) {   // unlinked: nothing left to free
      punched.push_back(ready[i++]);
      continue;
    }
    if (segment->is_read(ready[i].offset_4k)) {
      segment->unhold();
      i++;
      continue;
    }
    size_t next = i + 1;
    uint32_t end = ready[i].offset_4k + ready[i].blocks_4k;
    while (next < ready.size() && place(ready[next]) == std::pair(ready[i].segment, end) &&
           uint64_t(end + ready[next].blocks_4k - ready[i].offset_4k) * RECORD_ALIGN <= PUNCH_BYTES_MAX &&
           !segment->is_read(ready[next].offset_4k))
      end += ready[next++].blocks_4k;
    const uint64_t bytes = uint64_t(end - ready[i].offset_4k) * RECORD_ALIGN;
    if (SegmentFiles::punch(segment->fd(), uint64_t(ready[i].offset_4k) * RECORD_ALIGN, bytes) == 0) {
      counters_.punches++;
      counters_.punched_bytes += bytes;
      punched.insert(punched.end(), ready.begin() + ptrdiff_t(i), ready.begin() + ptrdiff_t(next));
    } else {
      counters_.punch_errors++;   // stays in limbo; its segment is unlinked when it is empty
    }
    segment->unhold();
    i = next;
  }
  if (punched.empty()) return;
  look_at_disk();   // writes that wait for room need not wait for the next look
  bool noted = false;
  with_index([&](Index& index) {
    std::lock_guard commit(commit_mutex_);
    noted = forget_freed(index, punched);
  });
  if (!noted) return;   // rows and places stay: punched again later
  std::lock_guard lock(limbo_mutex_);
  int64_t bytes = 0;
  std::erase_if(limbo_, [&](const Freed& f) {
    const auto at = std::lower_bound(punched.begin(), punched.end(), f, before);
    const bool gone = at != punched.end() && place(*at) == place(f);
    if (gone) bytes += int64_t(f.blocks_4k) * RECORD_ALIGN;
    return gone;
  });
  freeing_bytes_ -= bytes;
}

// Under commit_mutex_: deletes the rows of places that are given back. False: no room to delete in; nothing happened.
bool StoreImpl::forget_freed(Index& index, const std::vector<Freed>& places) {
  MDB_txn* txn = index.begin_write();
  int rc = 0;
  for (const Freed& f : places) {
    uint8_t place[8];
    store_be32(place, f.segment);
    store_be32(place + 4, f.offset_4k);
    MDB_val key = val(place, sizeof place);
    rc = mdb_del(txn, index.freed, &key, nullptr);
    if (rc && rc != MDB_NOTFOUND) break;
    rc = 0;
  }
  if (rc) mdb_txn_abort(txn);
  else rc = mdb_txn_commit(txn);
  if (rc && !out_of_space(rc)) throw IndexFault("freed", rc);
  return rc == 0;
}

// A sealed segment without a live record is unlinked whole: cheaper than its holes.
void StoreImpl::remove_empty_segments() {
  {
    std::lock_guard lock(stop_mutex_);
    if (!started_) return;
  }
  std::vector<uint32_t> candidates, later;
  {
    std::lock_guard commit(commit_mutex_);
    candidates.swap(empty_segments_);
  }
  std::sort(candidates.begin(), candidates.end());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  for (const uint32_t id : candidates) {
    const auto segment = segments_.find(id);
    if (!segment) continue;
    {
      std::lock_guard commit(commit_mutex_);
      if (segment->live_records != 0) continue;
    }
    bool settled = segment->sealed && !segment->is_held();
    {
      std::lock_guard lock(limbo_mutex_);
      for (const Freed& f : limbo_)
        if (f.segment == id && f.epoch + 2 > epoch_) settled = false;   // a lookup may still hand out a place in it
    }
    if (!settled) {
      if (segment->sealed) later.push_back(id);   // an unsealed one comes back when it is sealed
      continue;
    }
    // Unlinking first: a kill in between leaves rows of a file that is gone, and those count as punched.
    segments_.remove(segment);
    counters_.segments_removed++;
    std::vector<Freed> gone;
    {
      std::lock_guard lock(limbo_mutex_);
      for (const Freed& f : limbo_)
        if (f.segment == id) gone.push_back(f);
    }
    bool noted = false;
    with_index([&](Index& index) {
      std::lock_guard commit(commit_mutex_);
      noted = forget_freed(index, gone);
    });
    if (!noted) continue;   // punch_some() finds their file gone, and tries again
    std::lock_guard lock(limbo_mutex_);
    std::erase_if(limbo_, [&](const Freed& f) {
      if (f.segment == id) freeing_bytes_ -= int64_t(f.blocks_4k) * RECORD_ALIGN;
      return f.segment == id;
    });
  }
  std::lock_guard commit(commit_mutex_);
  empty_segments_.insert(empty_segments_.end(), later.begin(), later.end());
}

// Discards the damaged index and begins the rebuild. Verbs are kept out meanwhile by index_bad_ and then by the gate.
void StoreImpl::replace_index() {
  if (starter_.joinable()) starter_.join();   // a scan ends by itself when it finds the index bad
  {
    std::unique_lock gate(gate_);
    std::lock_guard commit(commit_mutex_);
    segments_.close_active();
    first_new_id_ = segments_.next_id();
    index_.reset();
    pins_.forget_all();
    {
      std::lock_guard lock(limbo_mutex_);
      limbo_.clear();   // the rebuild frees what nobody owns
    }
    freeing_bytes_ = used_bytes_ = parity_bytes_ = 0;
    totals_.clear();
    entries_ = 0;
    scanning_ = false;
    scan_filter_.reset();
    empty_segments_.clear();
    for (const auto& segment : segments_.all()) {
      segment->live_bytes = segment->live_records = 0;
      segment->sealed = segment->end_known = false;
    }
    try {
      open_index(true);
    } catch (const IndexFault&) {
      counters_.index_faults++;
      return;   // tried again at the next tick
    }
    std::lock_guard lock(stop_mutex_);
    start_mode_ = StartMode::REBUILD;
    start_reason_ = "the index was found damaged while running";
    started_ = false;
    index_bad_ = false;
  }
  starter_ = std::thread([this] { run_start(); });
}

void StoreImpl::flush() {
  flush_touches();
  sync_data();
  with_index([&](Index& index) { index.sync(); });
  std::lock_guard one(free_mutex_);
  for (int round = 0; round < 3; round++) {
    advance_epoch();
    remove_empty_segments();
    punch_some(UINT64_MAX, SIZE_MAX, 0);
  }
  look_for_zombies();
}

}  // namespace kv
