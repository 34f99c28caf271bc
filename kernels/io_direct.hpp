// The disk side of the direct engine: one io_uring, its thread, its huge-page buffers and the cache of what is read again.
//
// A span is an aligned run of a segment file in memory; whoever sends from it shares it with the cache. Depth is of the whole daemon,
// and bounded in bytes: more at the disk makes it no faster, only later, and all of it arrives at once in the end, when the processors
// have to work it off alone (docs/PERFORMANCE.md). Reads are served in the order they were asked.
//
// The engine "auto" is this one beside the page cache: what is in there goes out by sendfile; what is not is read O_DIRECT, which takes
// half the time of readahead (tried: 5 ms against 10 for 7 MB); what is so read a second time is fetched into the page cache afterwards.
#pragma once
#include <liburing.h>

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "io_engine.hpp"

namespace kv {

struct Span {
  uint64_t segment = 0, from = 0, to = 0;   // file offsets, multiples of RECORD_ALIGN
  Arena::Buffer buffer;
};

// Tells what comes up a second time, by hash; newer places push older ones out. All threads.
class Seen {
 public:
  bool again(uint64_t segment, uint64_t offset) {
    const uint64_t place[2] = {segment, offset};
    const uint64_t mark = XXH3_64bits(place, sizeof place) | 1;
    return marks_[mark % PLACES].exchange(mark, std::memory_order_relaxed) == mark;
  }

 private:
  static constexpr size_t PLACES = 16381;   // prime: marks are odd
  std::atomic<uint64_t> marks_[PLACES] = {};
};

// Spans read at least twice, least recently used out first. All threads.
class SpanCache {
 public:
  explicit SpanCache(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  // One that covers [from, to) of the segment, or null.
  std::shared_ptr<const Span> find(uint64_t segment, uint64_t from, uint64_t to);
  // Tells of a span that was read from disk and sent: kept if it was read before.
  void offer(std::shared_ptr<const Span> span);
  // Makes room in the arena: false when there is nothing to drop.
  bool drop_oldest();

 private:
  using Place = std::pair<uint64_t, uint64_t>;   // segment, from
  void drop(std::list<std::shared_ptr<const Span>>::iterator it);
  const uint64_t bytes_max_;
  std::mutex mutex_;
  uint64_t bytes_ = 0;
  std::list<std::shared_ptr<const Span>> order_;   // oldest first
  std::map<Place, std::list<std::shared_ptr<const Span>>::iterator> places_;
  Seen seen_;
};

struct DiskRead {
  enum : uint32_t { PENDING, WANTED, DONE };
  std::shared_ptr<Span> span;
  int fd = -1;
  uint64_t got = 0;
  int64_t begun_ns = 0;                     // 0: not yet at the disk
  Status status = Status::OK;               // valid once DONE
  std::atomic<uint32_t> state{PENDING};     // WANTED: a loop waits and has to be woken
  std::shared_ptr<ReadJob> job;             // keeps the shard open while the disk writes into the span; let go when DONE
  const ReadService::Wake* wake = nullptr;
};

class DirectService final : public ReadService {
 public:
  explicit DirectService(ServerShared& shared);   // std::system_error where there is no io_uring
  ~DirectService() override { stop(); }
  std::unique_ptr<ReadEngine> engine(Wake wake) override;
  void stop() override;
  const Arena* arena() const override { return &memory; }

  void submit(std::shared_ptr<DiskRead> read);
  Arena::Buffer take(uint64_t bytes);             // drops from the cache as needed; empty: all in use

  ServerShared& shared;
  const bool beside_page_cache;                   // the engine "auto"
  Seen seen;                                      // planes of records read from disk, for "auto"
  Arena memory;
  SpanCache cache;

 private:
  static constexpr uint64_t DISK_BYTES = 1 << 20;   // what an SSD moves in its latency, twice over
  void run();
  bool room_at_disk(const Span& next) const;
  void begin(const std::shared_ptr<DiskRead>& read);
  void finish(std::shared_ptr<DiskRead> read, Status status);

  io_uring ring_{};
  int wake_ = -1;
  uint64_t wake_count_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<DiskRead>> queue_;
  bool stopping_ = false;
  std::map<DiskRead*, std::shared_ptr<DiskRead>> at_disk_;   // the thread's own
};

}  // namespace kv
