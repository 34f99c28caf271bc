// io_uring with O_DIRECT into huge pages.
#include "io_direct.hpp"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

namespace kv {

// --- cache ---

std::shared_ptr<const Span> SpanCache::find(uint64_t segment, uint64_t from, uint64_t to) {
  std::lock_guard lock(mutex_);
  auto at = places_.upper_bound({segment, from});
  if (at == places_.begin()) return nullptr;
  --at;
  const auto& span = *at->second;
  if (span->segment != segment || span->from > from || span->to < to) return nullptr;
  order_.splice(order_.end(), order_, at->second);
  return span;
}

void SpanCache::offer(std::shared_ptr<const Span> span) {
  const uint64_t bytes = span->buffer.bytes();
  if (bytes > bytes_max_ / 4) return;
  const Place place{span->segment, span->from};
  if (!seen_.again(place.first, place.second)) return;
  std::lock_guard lock(mutex_);
  if (auto old = places_.find(place); old != places_.end()) {
    if ((*old->second)->to >= span->to) return;
    drop(old->second);
  }
  while (bytes_ + bytes > bytes_max_) drop(order_.begin());
  bytes_ += bytes;
  places_[place] = order_.insert(order_.end(), std::move(span));
}

bool SpanCache::drop_oldest() {
  std::lock_guard lock(mutex_);
  if (order_.empty()) return false;
  drop(order_.begin());
  return true;
}

void SpanCache::drop(std::list<std::shared_ptr<const Span>>::iterator it) {
  bytes_ -= (*it)->buffer.bytes();
  places_.erase({(*it)->segment, (*it)->from});
  order_.erase(it);
}

// --- disk ---

DirectService::DirectService(ServerShared& s)
    : shared(s),
      beside_page_cache(s.config.io == "auto"),
      memory(s.config.read_arena_bytes + (beside_page_cache ? 0 : s.config.read_cache_bytes), s.verbs ? Pages::Use::PINNED : Pages::Use::AS_USED),
      cache(beside_page_cache ? 0 : s.config.read_cache_bytes) {
  const int error = io_uring_queue_init(s.config.read_depth + 1, &ring_, 0);
  if (error < 0) throw std::system_error(-error, std::generic_category(), "io_uring_setup");
  wake_ = eventfd(0, EFD_CLOEXEC);
  if (wake_ < 0) {
    const int e = errno;
    io_uring_queue_exit(&ring_);
    throw std::system_error(e, std::generic_category(), "eventfd");
  }
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_setname_np(thread_.native_handle(), "kv-direct");
}

void DirectService::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) std::terminate();   // an eventfd far from full: cannot be
  thread_.join();
  io_uring_queue_exit(&ring_);
  ::close(wake_);
}

Arena::Buffer DirectService::take(uint64_t bytes) {
  Arena::Buffer buffer = memory.take(bytes);
  while (!buffer && cache.drop_oldest()) buffer = memory.take(bytes);
  return buffer;
}

void DirectService::submit(std::shared_ptr<DiskRead> read) {
  bool first;
  {
    std::lock_guard lock(mutex_);
    first = queue_.empty();
    queue_.push_back(std::move(read));
  }
  const uint64_t one = 1;
  if (first && write(wake_, &one, sizeof one) < 0) std::terminate();
}

bool DirectService::room_at_disk(const Span& next) const {
  if (at_disk_.empty()) return true;
  uint64_t bytes = next.to - next.from;
  for (const auto& [key, read] : at_disk_) bytes += read->span->to - read->span->from;
  return at_disk_.size() < shared.config.read_depth && bytes <= DISK_BYTES;
}

void DirectService::begin(const std::shared_ptr<DiskRead>& read) {
  Span& s = *read->span;
  if (!read->begun_ns) read->begun_ns = now_ns();
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);   // the ring has depth + 1 of them: never null
  io_uring_prep_read(sqe, read->fd, s.buffer.data() + read->got, unsigned(s.to - s.from - read->got), s.from + read->got);
  io_uring_sqe_set_data(sqe, read.get());
  at_disk_[read.get()] = read;
}

void DirectService::finish(std::shared_ptr<DiskRead> read, Status status) {
  std::shared_ptr<ReadJob> job = std::move(read->job);
  read->status = status;
  if (read->state.exchange(DiskRead::DONE, std::memory_order_acq_rel) == DiskRead::WANTED) (*read->wake)(job->conn, job->serial);
}

void DirectService::run() {
  std::deque<std::shared_ptr<DiskRead>> waiting;
  bool listening = false, stopping = false;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      for (auto& r : queue_) waiting.push_back(std::move(r));
      queue_.clear();
      stopping = stopping_;
    }
    while (!waiting.empty() && (stopping || room_at_disk(*waiting.front()->span))) {
      auto read = std::move(waiting.front());
      waiting.pop_front();
      if (stopping || read->job->dropped.load()) finish(std::move(read), Status::INTERNAL);
      else begin(read);
    }
    if (stopping && at_disk_.empty()) return;
    if (!listening) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_read(sqe, wake_, &wake_count_, sizeof wake_count_, 0);
      io_uring_sqe_set_data(sqe, nullptr);
      listening = true;
    }
    io_uring_submit_and_wait(&ring_, 1);
    io_uring_cqe* cqe;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      auto* key = static_cast<DiskRead*>(io_uring_cqe_get_data(cqe));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (!key) {
        listening = false;
        continue;
      }
      std::shared_ptr<DiskRead> read = std::move(at_disk_.extract(key).mapped());
      const uint64_t want = read->span->to - read->span->from;
      if (result > 0) read->got += uint64_t(result);
      if (result > 0 && read->got < want && read->got % RECORD_ALIGN == 0) {   // a short read: the rest
        waiting.push_front(std::move(read));
        continue;
      }
      if (result == -EINTR || result == -EAGAIN) {
        waiting.push_front(std::move(read));
        continue;
      }
      shared.stats.disk_read_seconds.observe(now_ns() - read->begun_ns);
      add(shared.stats.reads_direct);
      add(shared.stats.reads_direct_bytes, read->got);
      finish(std::move(read), read->got == want ? Status::OK : result < 0 ? Status::IO_ERROR : Status::CORRUPT);
    }
  }
}

// --- planning, on a bulk thread ---

namespace {

constexpr uint64_t GAP_BYTES = 64 << 10;     // read through rather than seek again: 64 KiB cost less than another request
constexpr uint64_t RUN_BYTES = 1 << 20;      // items are merged up to this, but for a job's first: sending should begin early

// One read: consecutive items of one segment, whose records lie close.
struct Run {
  uint32_t first = 0, last = 0;              // items, inclusive
  uint64_t from = 0, to = 0;                 // file offsets, aligned
  bool one_extent = true;
  bool fell_back = false;                    // read through the page cache
  std::shared_ptr<const Span> span;          // cached, or the read's
  std::shared_ptr<DiskRead> read;
};

struct DirectJob final : JobExtra {
  std::deque<Run> runs;                      // planned and not yet sent, in item order
  std::vector<bool> begun;                   // by extent: its first item is planned
  std::vector<uint32_t> from_disk;           // items that were read there
  uint32_t next_item = 0;                    // to plan
  uint64_t ahead_bytes = 0;                  // of `runs`
};

// Heads and checks of records that a READ asked for in part: a load by plane asks for the next plane soon, and they lie far from its pieces.
class LateMetas {
 public:
  bool has(const ExtentRead& e) const { return metas_.contains(name_of(e)); }
  // False: not here.
  bool recall(ReadJob& job, ExtentRead& e) const {
    const auto found = metas_.find(name_of(e));
    if (found == metas_.end()) return false;
    accept_meta(job, e, found->second);
    return true;
  }
  void keep(const ExtentRead& e) {
    if (e.items_left >= e.ref.shard_bytes.size() || !metas_.try_emplace(name_of(e), e.meta).second) return;
    order_.push_back(name_of(e));
    bytes_ += e.meta.size();
    while (bytes_ > BYTES_MAX) {
      const auto oldest = metas_.find(order_.front());
      bytes_ -= oldest->second.size();
      metas_.erase(oldest);
      order_.pop_front();
    }
  }

 private:
  static constexpr uint64_t BYTES_MAX = 2 << 20;   // some hundreds
  using Name = std::array<uint64_t, 3>;            // segment, offset, write id
  static Name name_of(const ExtentRead& e) { return {e.ref.segment_id(), e.ref.offset, e.ask.write_id}; }
  std::map<Name, std::vector<uint8_t>> metas_;
  std::deque<Name> order_;                         // oldest first
  uint64_t bytes_ = 0;
};

class Direct final : public ReadEngine {
 public:
  Direct(DirectService& service, ReadService::Wake wake) : service_(service), wake_(std::move(wake)), buffered_(buffered_engine()) {}

  void opened(const std::shared_ptr<ReadJob>& job, uint32_t, uint32_t) override {
    if (!job->extra) {
      auto extra = std::make_unique<DirectJob>();
      extra->begun.resize(job->extents.size());
      job->keep_open = true;   // a read of a shard whose head turns out to be bad may still be queued
      job->extra = std::move(extra);
    }
    plan_ahead(job);
  }

  Fetch fetch(const std::shared_ptr<ReadJob>& job, uint32_t item, Status& status, Source& source) override {
    auto& extra = static_cast<DirectJob&>(*job->extra);
    ExtentRead& e = job->extents[job->items[item].extent];
    uint64_t at = 0, bytes = 0;
    status = e.status;
    if (status == Status::OK) status = locate(e, job->items[item].plane, at, bytes);
    if (status != Status::OK) return Fetch::READY;
    Run* found = run_of(extra, item);
    if (!found) plan_ahead(job);
    if (!found && !(found = run_of(extra, item))) return Fetch::LATER;
    Run& run = *found;
    const bool first = e.meta.empty();
    if (first) metas_.recall(*job, e);
    if (run.fell_back) {
      const Fetch fetched = buffered_->fetch(job, item, status, source);
      if (first && !e.meta.empty()) metas_.keep(e);
      return fetched;
    }
    if (run.read) {
      uint32_t pending = DiskRead::PENDING;
      if (run.read->state.compare_exchange_strong(pending, DiskRead::WANTED, std::memory_order_acq_rel) || pending == DiskRead::WANTED)
        return Fetch::WAIT;
      if (run.read->status != Status::OK) {
        if (!run.one_extent) return split(job, extra, run), fetch(job, item, status, source);
        status = run.read->status;
        return Fetch::READY;
      }
    }
    const uint8_t* memory = run.span->buffer.data();
    const uint64_t record_at = e.ref.offset, from = run.span->from;
    if (e.meta.empty()) {
      if (from <= record_at && record_at + meta_bytes_of(e.ref) <= run.span->to)
        accept_meta(*job, e, std::vector<uint8_t>(memory + (record_at - from), memory + (record_at - from) + meta_bytes_of(e.ref)));
      else load_meta(*job, e);   // far from the first piece asked for, or its read failed
    }
    status = e.status;
    if (status != Status::OK) return Fetch::READY;
    if (first) metas_.keep(e);
    source = {memory + (record_at + at - from), -1, 0, bytes};
    return Fetch::READY;
  }

  void sent(const std::shared_ptr<ReadJob>& job, uint32_t item) override {
    auto& extra = static_cast<DirectJob&>(*job->extra);
    if (extra.runs.empty() || item != extra.runs.front().last) return;
    const Run run = std::move(extra.runs.front());
    extra.runs.pop_front();
    extra.ahead_bytes -= run.to - run.from;
    if (run.read && run.read->state.load(std::memory_order_acquire) == DiskRead::DONE && run.read->status == Status::OK) {
      if (!service_.beside_page_cache) service_.cache.offer(run.read->span);
      else
        for (uint32_t i = run.first; i <= run.last; i++) extra.from_disk.push_back(i);
    }
    plan_ahead(job);
  }

  void finished(ReadJob& job) override {
    if (!service_.beside_page_cache || !job.extra) return;
    for (uint32_t i : static_cast<DirectJob&>(*job.extra).from_disk) {   // by plane: a load may ask for each in a READ of its own
      const ReadRef& ref = job.extents[job.items[i].extent].ref;
      const uint32_t plane = job.items[i].plane;
      const uint64_t at = plane ? ref.pieces_at(plane) : 0, end = ref.pieces_at(plane) + uint64_t(ref.shard_bytes[plane]) * ref.block_count;
      if (service_.seen.again(ref.segment_id(), ref.offset + at)) will_need(ref.fd(), ref.offset + at, end - at);
    }
  }

 private:
  // Items without a run were answered without one, so the first run that ends there or later is the item's.
  static Run* run_of(DirectJob& extra, uint32_t item) {
    for (Run& run : extra.runs)
      if (item <= run.last) return &run;
    return nullptr;
  }

  // Plans and submits until the window is full or the extents are not open yet.
  void plan_ahead(const std::shared_ptr<ReadJob>& job) {
    auto& extra = static_cast<DirectJob&>(*job->extra);
    const uint64_t window = std::max<uint64_t>(service_.shared.config.read_arena_bytes / 8, 2 * RUN_BYTES);
    while (extra.next_item < job->items.size() && (extra.runs.empty() || extra.ahead_bytes < window)) {
      if (job->items[extra.next_item].extent >= job->opened) return;
      Run run;
      const uint32_t before = extra.next_item;
      if (!gather(*job, extra, uint32_t(job->items.size()), false, run)) continue;
      if (!start(job, run) && !extra.runs.empty()) {   // no memory now: later, when what is ahead has been sent
        extra.next_item = before;
        return;
      }
      for (uint32_t i = run.first; i <= run.last; i++) extra.begun[job->items[i].extent] = true;
      extra.ahead_bytes += run.to - run.from;
      extra.runs.push_back(std::move(run));
    }
  }

  // File offsets of an item, and of its extent's head where that is read with it. False: it cannot be answered.
  bool range(const ReadJob& job, const DirectJob& extra, uint32_t item, uint64_t& from, uint64_t& to) const {
    const uint32_t extent = job.items[item].extent;
    const ExtentRead& e = job.extents[extent];
    uint64_t at = 0, bytes = 0;
    if (e.status != Status::OK || locate(e, job.items[item].plane, at, bytes) != Status::OK) return false;
    const bool first = !extra.begun[extent] && (!item || job.items[item - 1].extent != extent);
    from = e.ref.offset + (first && at - meta_bytes_of(e.ref) <= GAP_BYTES && !metas_.has(e) ? 0 : at);
    to = e.ref.offset + at + bytes;
    return true;
  }

  // The next item, and those behind it, before `end`, that lie close. False: it needs no read, for it cannot be answered.
  bool gather(ReadJob& job, DirectJob& extra, uint32_t end, bool one_extent, Run& run) {
    const uint32_t first = run.first = run.last = extra.next_item++;
    const ExtentRead& e = job.extents[job.items[first].extent];
    if (!range(job, extra, first, run.from, run.to)) return false;
    const bool here = cached(e, run.to);
    one_extent |= !service_.beside_page_cache || here;   // spans of the cache are of one record, whatever was asked for beside it
    for (uint64_t from, to; first && extra.next_item < end; run.last = extra.next_item++) {
      const uint32_t extent = job.items[extra.next_item].extent;
      if (extent >= job.opened || !range(job, extra, extra.next_item, from, to)) break;
      const ExtentRead& x = job.extents[extent];
      const bool other = extent != job.items[first].extent;
      if (other && (one_extent || x.ref.segment_id() != e.ref.segment_id() || cached(x, to))) break;
      if (from < run.from || from > run.to + GAP_BYTES || std::max(run.to, to) - run.from > RUN_BYTES) break;
      run.to = std::max(run.to, to);
      run.one_extent &= !other;
    }
    run.fell_back = run.one_extent && (run.last == first ? here : cached(e, run.to));
    run.from = run.from / RECORD_ALIGN * RECORD_ALIGN;
    run.to = align_up(run.to, RECORD_ALIGN);
    return true;
  }

  bool cached(const ExtentRead& e, uint64_t end) const { return service_.beside_page_cache && resident(e.ref.fd(), end - 1).value_or(true); }

  // A read of several records failed, of which one may be bad: each by itself.
  void split(const std::shared_ptr<ReadJob>& job, DirectJob& extra, const Run& failed) {
    const auto at = std::find_if(extra.runs.begin(), extra.runs.end(), [&](const Run& run) { return &run == &failed; }) - extra.runs.begin();
    const uint32_t end = failed.last + 1, next_item = std::exchange(extra.next_item, failed.first);
    extra.ahead_bytes -= failed.to - failed.from;
    std::vector<Run> parts;
    while (extra.next_item < end)
      if (Run run; gather(*job, extra, end, true, run)) {
        start(job, run);
        extra.ahead_bytes += run.to - run.from;
        parts.push_back(std::move(run));
      }
    extra.next_item = next_item;
    extra.runs.erase(extra.runs.begin() + at);
    extra.runs.insert(extra.runs.begin() + at, std::make_move_iterator(parts.begin()), std::make_move_iterator(parts.end()));
  }

  // From the cache, from the disk, or (true as well, fell_back) through the page cache. False: no memory for it now.
  bool start(const std::shared_ptr<ReadJob>& job, Run& run) {
    ExtentRead& e = job->extents[job->items[run.first].extent];
    if (run.fell_back) {
      add(service_.shared.stats.reads_fell_back);
      return true;
    }
    const uint64_t segment = e.ref.segment_id();
    if ((run.span = service_.cache.find(segment, run.from, run.to))) {
      add(service_.shared.stats.reads_cached);
      return true;
    }
    auto span = std::make_shared<Span>();
    span->segment = segment;
    span->from = run.from;
    span->to = run.to;
    span->buffer = service_.take(run.to - run.from);
    const int fd = span->buffer ? e.ref.fd_direct() : -1;
    if (fd < 0) {
      run.fell_back = true;
      add(service_.shared.stats.reads_fell_back);
      return bool(span->buffer);
    }
    auto read = std::make_shared<DiskRead>();
    read->span = span;
    read->fd = fd;
    read->job = job;
    read->wake = &wake_;
    run.span = std::move(span);
    run.read = read;
    service_.submit(std::move(read));
    return true;
  }

  DirectService& service_;
  ReadService::Wake wake_;
  std::unique_ptr<ReadEngine> buffered_;
  LateMetas metas_;
};

}  // namespace

std::unique_ptr<ReadEngine> DirectService::engine(Wake wake) { return std::make_unique<Direct>(*this, std::move(wake)); }

std::unique_ptr<ReadService> direct_reads(ServerShared& shared, std::string& why) {
  if (shared.config.io == "auto") {
    const int any = memfd_create("probe", MFD_CLOEXEC);
    const bool told = any >= 0 && resident(any, 0).has_value();
    if (any >= 0) ::close(any);
    if (!told) {
      why = "this kernel does not tell what is cached (cachestat, Linux 6.5)";
      return nullptr;
    }
  }
  try {
    return std::make_unique<DirectService>(shared);
  } catch (const std::system_error& e) {
    why = std::string("no io_uring here: ") + e.what();
    return nullptr;
  }
}

}  // namespace kv
