// Opening, the start scan, closing.
//
// Opening is quick whatever is stored: verbs are served at once, and the start scan runs beside them. It walks the index in short steps
// under the commit mutex; a change behind the walk counts in the totals and the filter being built, a change ahead of it does not yet.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>

#include "filter_file.hpp"
#include "store_impl.hpp"

namespace kv {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t ASKED_MAX = 4u << 20;     // 16 MiB in two generations: 90 a second for 12 hours
constexpr uint64_t CHANCES_MAX = 4u << 20;   // 16 MiB in two generations: a day of writes of a busy node

constexpr uint64_t CRASH_WINDOW_MS = 60000;
constexpr double CLOSE_WAIT_SECONDS = 10;
constexpr uint64_t INDEX_MAP_MIN = 1ull << 30;

StoreConfig checked(StoreConfig c) {
  if (c.dir.empty()) throw std::runtime_error("no data directory given");
  if (c.bucket_seconds < 1) throw std::runtime_error("bucket_seconds must be at least 1");
  if (c.segment_bytes < 64 * 1024 || c.segment_bytes > (256u << 20)) throw std::runtime_error("segment_bytes must be 64 KiB to 256 MiB");
  std::error_code error;
  fs::create_directories(c.dir, error);
  if (error) throw std::runtime_error("cannot make data directory " + c.dir + ": " + error.message());
  if (!c.index_map_bytes) {
    uint64_t space = c.capacity_bytes;
    if (!space) space = fs::space(c.dir, error).capacity;
    c.index_map_bytes = std::max(INDEX_MAP_MIN, space / 50);
  }
  c.index_map_bytes = align_up(c.index_map_bytes, 1 << 20);
  return c;
}

bool has_files(const std::string& dir) {
  std::error_code error;
  return fs::exists(dir, error) && !fs::is_empty(dir, error);
}

bool read_trailer(int fd, uint32_t segment, uint64_t& data_end) {
  struct stat st{};
  FooterTrailer t;
  if (fstat(fd, &st) != 0 || st.st_size < RECORD_ALIGN || st.st_size % RECORD_ALIGN) return false;
  if (!SegmentFiles::read_all(fd, reinterpret_cast<uint8_t*>(&t), sizeof t, uint64_t(st.st_size) - sizeof t)) return false;
  data_end = t.footer_offset;
  return t.magic == FOOTER_MAGIC && t.version == FOOTER_VERSION && t.segment == segment &&
         t.footer_offset + t.footer_bytes == uint64_t(st.st_size);
}

}  // namespace

StoreImpl::StoreImpl(const StoreConfig& config)
    : config_(checked(config)),
      lock_(std::make_unique<DirLock>(config_.dir)),
      segments_(config_.dir + "/segments", config_.segment_bytes, config_.strict_sync),
      pins_(config_.pins_max),
      chances_(std::clamp<uint64_t>(config_.capacity_bytes / RECORD_ALIGN, 4096, CHANCES_MAX)),
      asked_(ASKED_MAX) {
  for (uint32_t c = 0; c < CLASSES_MAX; c++) retention_[c] = config_.retention_seconds[c];
  const uint64_t ghost_bytes_max = std::max<uint64_t>(1 << 20, config_.capacity_bytes ? config_.capacity_bytes / 2000 : 256ull << 20);
  ghosts_ = std::make_unique<Ghosts>(config_.dir + "/ghosts", ghost_bytes_max);
  start_mode_ = decide_start(state_, saved_filter_, start_reason_);
  bool discard = start_mode_ == StartMode::REBUILD || start_mode_ == StartMode::FRESH;
  if (discard && start_mode_ == StartMode::REBUILD) {
    const int fd = ::open(marker().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) throw std::runtime_error("cannot write " + marker() + ": " + strerror(errno));
    ::close(fd);
  }
  write_state(config_.dir, state_);
  try {
    open_index(discard);
    take_filter();
  } catch (const IndexFault& why) {
    if (discard) throw std::runtime_error(std::string("cannot make an index in ") + config_.dir + ": " + why.what());
    start_mode_ = StartMode::REBUILD;
    start_reason_ = why.what();
    const int fd = ::open(marker().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) ::close(fd);
    try {
      open_index(true);
      take_filter();
    } catch (const IndexFault& again) {
      throw std::runtime_error(std::string("cannot make an index in ") + config_.dir + ": " + again.what());
    }
  }
  first_new_id_ = segments_.next_id();
  // Until the scan knows better. A rebuild counts what it finds.
  if (start_mode_ == StartMode::CLEAN || start_mode_ == StartMode::KILLED) used_bytes_ = int64_t(segments_.disk_bytes());
  starter_ = std::thread([this] { run_start(); });
  maintainer_ = std::thread([this] { run_maintenance(); });
  syncer_ = std::thread([this] { run_sync(); });
  inspector_ = std::thread([this] { run_suspects(); });
}

StoreImpl::~StoreImpl() { close(false); }

StartMode StoreImpl::decide_start(DirState& state, uint64_t& filter, std::string& reason) {
  DirState old;
  const StateRead read = read_state(config_.dir, old);
  const uint64_t now = boottime_ms();
  state = old;
  filter = old.filter;
  if (state.id.empty()) state.id = random_hex(16);
  state.boot = machine_boot_id();
  state.running = true;
  state.filter = 0;
  state.strict = config_.strict_sync;
  state.crashed_ms = 0;
  std::error_code error;
  if (read == StateRead::MISSING && !has_files(config_.dir + "/segments")) {
    reason = "new directory";
    return StartMode::FRESH;
  }
  if (read != StateRead::OK) return reason = "state file missing or damaged", StartMode::REBUILD;
  if (fs::exists(marker(), error)) return reason = "an earlier rebuild did not finish, or the index was found damaged", StartMode::REBUILD;
  if (!fs::exists(config_.dir + "/index/data.mdb", error)) return reason = "no index", StartMode::REBUILD;
  if (!old.running) return reason = "clean stop", StartMode::CLEAN;
  if (old.boot != state.boot) {
    reason = "power loss";
    return old.strict ? StartMode::KILLED : StartMode::REBUILD;
  }
  state.crashed_ms = now;
  if (old.crashed_ms && now - old.crashed_ms <= CRASH_WINDOW_MS) return reason = "two crashes within a minute", StartMode::REBUILD;
  reason = "unclean stop";
  return StartMode::KILLED;
}

void StoreImpl::open_index(bool discard) {
  const std::string dir = config_.dir + "/index";
  if (discard) {
    std::error_code error;
    fs::remove_all(dir, error);
  }
  index_ = std::make_unique<Index>(dir, config_.index_map_bytes, discard);
  if (discard) {   // nothing in it: nothing to scan
    std::lock_guard lock(filter_mutex_);
    filter_ = std::make_unique<CuckooFilter>(1 << 16);
    totals_ready_ = true;
  }
}

// After a clean stop lookups of what is not here need no index from the first one on; the start scan builds a filter anew all the same.
// The file goes before anything can change: the state that named it is gone already.
void StoreImpl::take_filter() {
  if (start_mode_ == StartMode::CLEAN && saved_filter_) {
    std::string why = "of another state of the index";
    std::unique_ptr<CuckooFilter> filter;
    if (index_->stop() == saved_filter_) filter = load_filter(config_.dir, {saved_filter_, index_->last_txn()}, why);
    filter_start_ = filter ? "loaded" : why;
    std::lock_guard lock(filter_mutex_);
    filter_ = std::move(filter);
  }
  unlink(filter_path(config_.dir).c_str());
  unlink((filter_path(config_.dir) + ".new").c_str());
}

// The last of a clean stop: what comes after it in the index makes the file one of another index.
void StoreImpl::save_filter_of_stop() {
  with_index([&](Index& index) {
    std::lock_guard commit(commit_mutex_);
    const auto sound = [this] {
      std::shared_lock lock(filter_mutex_);
      return filter_ && !filter_->saturated();
    };
    const uint64_t stop = strtoull(random_hex(8).c_str(), nullptr, 16) | 1;
    if (!sound() || !index.set_stop(stop)) return;   // the index's own lock comes before the filter's
    index.sync();
    std::shared_lock lock(filter_mutex_);
    if (save_filter(config_.dir, *filter_, {stop, index.last_txn()})) state_.filter = stop;
    else counters_.io_errors++;
  });
}

// The index can no longer be trusted. The maintenance thread replaces it; until then every verb answers "not now".
void StoreImpl::fault(const std::exception& why) {
  {
    std::lock_guard lock(fault_mutex_);
    last_fault_ = why.what();
  }
  counters_.index_faults++;
  const int fd = ::open(marker().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd >= 0) ::close(fd);
  index_bad_ = true;
  stop_cv_.notify_all();
}

void StoreImpl::run_start() {
  timespec begin{}, end{};
  clock_gettime(CLOCK_MONOTONIC, &begin);
  bool whole = true;
  if (start_mode_ == StartMode::REBUILD) {
    whole = rebuild_segments();
  } else if (start_mode_ != StartMode::FRESH) {
    Ranges owned;   // of segments without a footer: an unclean stop may have left bytes there that nobody owns
    std::vector<std::shared_ptr<Segment>> open;
    for (const auto& segment : segments_.all()) {
      if (segment->id >= first_new_id_) continue;
      uint64_t data_end = 0;
      if (segment->hold() < 0) continue;
      if (read_trailer(segment->fd(), segment->id, data_end)) {
        segment->append_at = data_end;
        segment->sealed = true;
      } else {
        owned[segment->id];
        open.push_back(segment);
      }
      segment->unhold();
    }
    warm_index();
    load_freed();
    whole = scan_index(true, &owned);
    if (whole)
      for (const auto& segment : open) clean_segment(segment, std::move(owned[segment->id]), true);
  }
  if (whole) {
    std::lock_guard commit(commit_mutex_);
    for (const auto& segment : segments_.all())
      if (segment->live_records == 0 && segment->sealed) empty_segments_.push_back(segment->id);
  }
  const auto stopping = [this] {
    std::lock_guard lock(stop_mutex_);
    return stopping_;
  };
  while (!stopping() && ghosts_->load_some()) {
  }
  pins_.forget_all();   // entries came and went without a word
  clock_gettime(CLOCK_MONOTONIC, &end);
  start_ms_ = uint64_t((end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000);
  std::lock_guard lock(stop_mutex_);
  started_ = whole;
  stop_cv_.notify_all();
}

// The scan reads the index in key order, which is no order on the disk: the file is asked for in one go, where memory allows.
void StoreImpl::warm_index() {
  struct sysinfo memory{};
  struct stat st{};
  const int fd = ::open((config_.dir + "/index/data.mdb").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (sysinfo(&memory) == 0 && fstat(fd, &st) == 0 && uint64_t(st.st_size) < uint64_t(memory.totalram) * memory.mem_unit / 4)
    posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
  ::close(fd);
}

// Places that were deleted before the stop and not punched yet.
void StoreImpl::load_freed() {
  with_index([&](Index& index) {
    std::lock_guard commit(commit_mutex_);
    Index::Reader reader(index);
    MDB_cursor* cursor = nullptr;
    if (int rc = mdb_cursor_open(reader.txn, index.freed, &cursor)) throw IndexFault("freed", rc);
    MDB_val key, value;
    std::vector<Freed> stale;
    std::lock_guard lock(limbo_mutex_);
    std::set<std::pair<uint32_t, uint32_t>> known;   // deleted since this process started
    for (const Freed& f : limbo_) known.emplace(f.segment, f.offset_4k);
    for (int rc = mdb_cursor_get(cursor, &key, &value, MDB_FIRST); rc == 0; rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
      if (key.mv_size != 8 || value.mv_size != 4) continue;
      const auto* place = static_cast<const uint8_t*>(key.mv_data);
      uint32_t blocks;
      std::memcpy(&blocks, value.mv_data, 4);
      const Freed row{load_be32(place), load_be32(place + 4), blocks, 0, 0};
      if (known.contains({row.segment, row.offset_4k})) continue;
      if (row.segment >= first_new_id_ || !segments_.find(row.segment)) {   // its file is gone; the number may be in use again
        stale.push_back(row);
        continue;
      }
      limbo_.push_back(row);
      freeing_bytes_ += int64_t(blocks) * RECORD_ALIGN;
    }
    mdb_cursor_close(cursor);
    // In this very section: a row that comes later under the same number is another's. What cannot go now is stale at the next start, too.
    if (!stale.empty()) forget_freed(index, stale);
  });
}

// Walks all entries in key order; builds a new filter, and on request the totals. `owned`: collects the places in those segments.
bool StoreImpl::scan_index(bool with_totals, Ranges* owned) {
  constexpr uint32_t STEP_ROWS = 4096;
  {
    std::lock_guard commit(commit_mutex_);
    scan_filter_ = std::make_unique<CuckooFilter>(index_->entries() * 3 / 2 + (1 << 16));
    scanning_ = true;
    scanning_totals_ = with_totals;
    scan_begun_ = false;
  }
  bool done = false, stopped = false;
  while (!done && !stopped) {
    const bool looked = with_index([&](Index& index) {
      std::lock_guard commit(commit_mutex_);
      Index::Reader reader(index);
      EntryKey from{};
      if (scan_begun_) {
        std::memset(from.data(), 0xff, from.size());   // past every entry of the last group seen
        std::memcpy(from.data(), scan_at_.data(), GROUP_BYTES);
      }
      MDB_val key = val(from), value;
      uint32_t rows = 0;
      int rc = mdb_cursor_get(reader.extents, &key, &value, MDB_SET_RANGE);
      for (; rc == 0; rc = mdb_cursor_get(reader.extents, &key, &value, MDB_NEXT), rows++) {
        Entry entry;
        if (!decode_entry(key, value, entry)) throw IndexFault("value", MDB_CORRUPTED);
        const auto* bytes = static_cast<const uint8_t*>(key.mv_data);
        const bool new_group = !scan_begun_ || std::memcmp(bytes, scan_at_.data(), GROUP_BYTES) != 0;
        if (new_group && rows >= STEP_ROWS) return;
        if (scan_begun_ && std::memcmp(bytes, scan_at_.data(), GROUP_BYTES) < 0) throw IndexFault("order", MDB_CORRUPTED);
        std::memcpy(scan_at_.data(), bytes, GROUP_BYTES);
        scan_begun_ = true;
        if (new_group) scan_filter_->insert(CuckooFilter::hash(bytes));
        if (!with_totals) continue;
        const EntryFixed& f = entry.fixed;
        entries_++;
        if (config_.virtual_clock) clamp_bucket(f.bucket);
        QueueTotals& totals = totals_[{queue_of(f), owner_of_entry(bytes)}];
        totals.rows++;
        totals.bytes += int64_t(entry.padded_bytes());
        if (bytes[ENTRY_KEY_BYTES - 1] >= f.k) parity_bytes_ += int64_t(entry.padded_bytes());
        if (f.segment == SEGMENT_SYNTHETIC) continue;
        if (const auto segment = segments_.find(f.segment)) {
          segment->live_records++;
          segment->live_bytes += int64_t(entry.padded_bytes());
        }
        if (owned)
          if (const auto it = owned->find(f.segment); it != owned->end()) it->second.emplace_back(f.offset_4k, entry.padded_4k());
      }
      if (rc != MDB_NOTFOUND) throw IndexFault("scan", rc);
      if (with_totals) {
        // A page that can no longer be reached has no wrong sum: it is missed in the count.
        MDB_stat extents{}, recency{};
        mdb_stat(reader.txn, index.extents, &extents);
        mdb_stat(reader.txn, index.recency, &recency);
        if (int64_t(extents.ms_entries) != entries_ || recency.ms_entries != extents.ms_entries) throw IndexFault("count", MDB_CORRUPTED);
        totals_ready_ = true;
        int64_t bytes = 0;
        for (const auto& [id, totals] : totals_) bytes += totals.bytes;
        used_bytes_ = bytes;
      }
      scanning_ = false;
      done = true;
      std::lock_guard lock(filter_mutex_);
      filter_ = std::move(scan_filter_);
    });
    std::unique_lock lock(stop_mutex_);
    stopped = stopping_ || !looked;
    if (!done && !stopped) stop_cv_.wait_for(lock, std::chrono::microseconds(100));   // let writers in
  }
  if (!done) {
    std::lock_guard commit(commit_mutex_);
    scanning_ = false;
    scan_filter_.reset();
  }
  return done;
}

bool StoreImpl::wait_started(double timeout_seconds) {
  std::unique_lock lock(stop_mutex_);
  stop_cv_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [this] { return (started_ && !index_bad_) || stopping_; });
  return started_ && !index_bad_;
}

void StoreImpl::close(bool clean) {
  if (clean) wait_started(CLOSE_WAIT_SECONDS);
  {
    std::lock_guard lock(stop_mutex_);
    if (closed_) return;
    closed_ = stopping_ = true;
  }
  stop_cv_.notify_all();
  poke_pressure(1);
  suspects_.end();
  for (std::thread* t : {&maintainer_, &syncer_, &inspector_, &starter_})   // the maintainer may begin a new starter
    if (t->joinable()) t->join();
  if (clean && !index_bad_) close_cleanly();
  // LMDB keeps per-process state: the environment is gone before the directory's lock is, or the next one in this process would suffer.
  index_bad_ = true;
  std::unique_lock gate(gate_);
  index_.reset();
  lock_.reset();
}

void StoreImpl::close_cleanly() {
  flush_touches();
  segments_.close_active();
  bool sound = started_;
  if (started_)
    for (const auto& segment : segments_.to_seal()) sound = segments_.seal(segment) == Status::OK && sound;
  sync_data();
  with_index([&](Index& index) { index.sync(); });
  // A start scan that was cut short left tails unsealed: the next start must look at them as after a kill.
  if (sound) {
    save_filter_of_stop();
    state_.running = false;
    state_.crashed_ms = 0;
    write_state(config_.dir, state_);
  }
}

}  // namespace kv
