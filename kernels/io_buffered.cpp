// The buffered engine: readahead for all extents of a READ at once, then sendfile; the page cache is the cache.
//
// (tried: sendfile reaches 0.73-0.77 of raw loopback, pread + send 0.50, mmap + send 0.64.)
// Not covered: sendfile of a page that is not there yet blocks this bulk thread; the other bulk threads go on.
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "io_engine.hpp"
#include "segments.hpp"

namespace kv {

void ReadJob::close_extent(ExtentRead& e) {
  sub(shared.stats.read_head_bytes, e.meta.size());
  head_bytes -= e.meta.size();
  e.meta = {};
  if (!keep_open) e.ref = ReadRef();
}

void accept_meta(ReadJob& job, ExtentRead& e, std::vector<uint8_t> meta) {
  const RecordHead& h = RecordView{meta.data()}.head();
  e.status = check_head(meta.data(), meta.size());
  // Bytes of another record at this place (a misdirected write) are as bad as flipped bits.
  if (e.status == Status::OK &&
      (std::memcmp(h.owner, job.owner.data(), OWNER_BYTES) || std::memcmp(h.extent_key, e.ask.extent_key, KEY_BYTES) ||
       h.write_id != e.ask.write_id || h.shard != e.ask.shard || h.record_bytes != e.ref.record_bytes || h.head_bytes != e.ref.head_bytes ||
       h.block_count != e.ref.block_count || h.plane_count != e.ref.shard_bytes.size() ||
       XXH3_64bits(meta.data() + h.head_bytes, meta.size() - h.head_bytes) != h.checks_sum))
    e.status = Status::CORRUPT;
  if (e.status == Status::BAD_REQUEST) e.status = Status::CORRUPT;   // a head out of range on disk is rot, not the reader's fault
  if (e.status == Status::CORRUPT) job.shared.store.report_corrupt(job.owner, e.ask.extent_key, e.ask.write_id, e.ask.shard);
  if (e.status != Status::OK) return;
  if (job.shared.stats.read_head_bytes.load(std::memory_order_relaxed) + meta.size() > job.shared.config.read_head_bytes_max) {
    e.status = Status::BUSY;
    return;
  }
  add(job.shared.stats.read_head_bytes, meta.size());
  job.head_bytes += meta.size();
  e.meta = std::move(meta);
}

Status locate(const ExtentRead& e, uint32_t plane, uint64_t& offset, uint64_t& bytes) {
  const ReadRef& ref = e.ref;
  if (plane >= ref.shard_bytes.size() || !e.ask.block_count || uint32_t(e.ask.first_block) + e.ask.block_count > ref.block_count)
    return Status::BAD_REQUEST;
  const uint64_t piece = ref.shard_bytes[plane];
  offset = ref.pieces_at(plane) + piece * e.ask.first_block;
  bytes = piece * e.ask.block_count;
  return offset + bytes <= ref.record_bytes ? Status::OK : Status::CORRUPT;
}

// cachestat(2), Linux 6.5, not yet in libc. (preadv2 with RWF_NOWAIT will not do: where the page is missing it starts a readahead.)
std::optional<bool> resident(int fd, uint64_t offset) {
  constexpr long CACHESTAT = 451;   // of every architecture
  struct { uint64_t offset, bytes; } range{offset / RECORD_ALIGN * RECORD_ALIGN, RECORD_ALIGN};
  struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found{};
  if (syscall(CACHESTAT, fd, &range, &found, 0u) != 0) return std::nullopt;
  return found.cached > 0;
}

// The probe costs 1 us; walking the pages of a piece that is there, as the kernel does when asked for them, 5% of serving it. A wrong guess
// only means that sendfile reads ahead by itself.
void will_need(int fd, uint64_t offset, uint64_t bytes) {
  constexpr uint64_t PIECE = 128 << 10;   // one WILLNEED is cut to the device's readahead size: ask in pieces of the smallest
  const uint64_t end = offset + bytes;
  if (!bytes || resident(fd, end - 1).value_or(false)) return;
  for (uint64_t at = offset / PIECE * PIECE; at < end; at += PIECE) posix_fadvise(fd, off_t(at), off_t(PIECE), POSIX_FADV_WILLNEED);
}

namespace {

// The whole of it, or an error status.
Status read_all(int fd, uint8_t* to, uint64_t bytes, uint64_t offset) {
  if (SegmentFiles::read_all(fd, to, bytes, offset)) return Status::OK;
  return errno == ENODATA ? Status::CORRUPT : Status::IO_ERROR;   // the file ends inside the record
}

}  // namespace

void load_meta(ReadJob& job, ExtentRead& e) {
  std::vector<uint8_t> meta(meta_bytes_of(e.ref));
  e.status = meta.size() > e.ref.record_bytes ? Status::CORRUPT : read_all(e.ref.fd(), meta.data(), meta.size(), e.ref.offset);
  if (e.status == Status::OK) accept_meta(job, e, std::move(meta));
}

namespace {

class Buffered final : public ReadEngine {
 public:
  void opened(const std::shared_ptr<ReadJob>& job, uint32_t first, uint32_t last) override {
    for (uint32_t i = first; i < last; i++) {
      const ExtentRead& e = job->extents[i];
      if (e.status == Status::OK) will_need(e.ref.fd(), e.ref.offset, meta_bytes_of(e.ref));
    }
    for (const auto& item : job->items) {
      const ExtentRead& e = job->extents[item.extent];
      uint64_t at = 0, bytes = 0;
      if (item.extent < first || item.extent >= last || e.status != Status::OK || locate(e, item.plane, at, bytes) != Status::OK) continue;
      will_need(e.ref.fd(), e.ref.offset + at, bytes);
    }
  }

  Fetch fetch(const std::shared_ptr<ReadJob>& job, uint32_t item, Status& status, Source& source) override {
    const wire::ReadItem& asked = job->items[item];
    ExtentRead& e = job->extents[asked.extent];
    if (e.status == Status::OK && e.meta.empty()) load_meta(*job, e);
    status = e.status;
    uint64_t at = 0, bytes = 0;
    if (status == Status::OK) status = locate(e, asked.plane, at, bytes);
    if (status != Status::OK) return Fetch::READY;
    source = {nullptr, e.ref.fd(), e.ref.offset + at, bytes};
    if (bytes <= COPY_BYTES) {
      small_.resize(bytes);
      status = read_all(e.ref.fd(), small_.data(), bytes, source.offset);
      source.memory = small_.data();   // good until the next fetch: the loop copies it at once
    }
    return Fetch::READY;
  }

  void sent(const std::shared_ptr<ReadJob>&, uint32_t) override {}

 private:
  std::vector<uint8_t> small_;
};

class BufferedService final : public ReadService {
 public:
  std::unique_ptr<ReadEngine> engine(Wake) override { return buffered_engine(); }
};

}  // namespace

std::unique_ptr<ReadEngine> buffered_engine() { return std::make_unique<Buffered>(); }
std::unique_ptr<ReadService> buffered_reads() { return std::make_unique<BufferedService>(); }

}  // namespace kv
