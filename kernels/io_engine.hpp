// How bytes of records move from disk to a READ's answer; where they lie is the store's affair.
//
// A ReadService is one per daemon; each bulk thread takes one ReadEngine of it. For one READ, all on that thread, in this order:
//   opened(job, first, last)   extents [first, last) of the job were just opened: fetching may begin
//   fetch(job, i)              READY: the item's status is known and, if OK, `source` tells where its piece is now
//                              WAIT: the loop will get READ_DONE for the connection; ask again then
//                              LATER: when more of what was fetched is sent (only where many items are fetched ahead of sent(), as RDMA does)
//   sent(job, i)               the piece is in the socket, or with the peer; its memory may go. In order
//   finished(job)              all items are sent
// A job that is dropped early (its connection died) simply goes: what is still in flight keeps what it needs.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "server.hpp"

namespace kv {

// Pieces up to this size are gathered in memory and sent together: cheaper than one sendfile or sendmsg each.
inline constexpr uint64_t COPY_BYTES = 16 << 10;

// A run of bytes of one item: in memory (until the next fetch if it is no longer than COPY_BYTES, else until sent), or in a file.
struct Source {
  const uint8_t* memory = nullptr;
  int fd = -1;
  uint64_t offset = 0, bytes = 0;
};

struct ExtentRead {
  wire::ReadExtent ask{};
  Status status = Status::NOT_FOUND;   // OK only while `ref` holds the shard open
  uint32_t items_left = 0;      // when none is left the shard is let go
  ReadRef ref;
  std::vector<uint8_t> meta;    // head | checks, verified; empty until needed
  RecordView view() const { return RecordView{meta.data()}; }
};

struct JobExtra {   // what an engine keeps beside a job
  virtual ~JobExtra() = default;
};

struct ReadJob {
  explicit ReadJob(ServerShared& s) : shared(s) {}
  ~ReadJob() {
    sub(shared.stats.read_head_bytes, head_bytes);
    shared.read_ask_bytes -= ask_bytes;
  }
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  ServerShared& shared;
  uint64_t conn = 0, serial = 0;
  Owner owner{};
  std::vector<ExtentRead> extents;
  std::vector<wire::ReadItem> items;
  uint32_t opened = 0, next = 0;   // extents opened; items answered
  uint64_t ask_bytes = 0;          // of extents and items, counted in shared.read_ask_bytes
  uint64_t head_bytes = 0;         // held in extents[].meta, counted in stats.read_head_bytes
  std::atomic<bool> dropped{false};   // its connection is gone: read no more for it
  std::unique_ptr<JobExtra> extra;

  bool keep_open = false;          // let go of shards only when all is answered
  void close_extent(ExtentRead& e);   // its last item is sent
};

enum class Fetch : uint8_t { READY, WAIT, LATER };

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;
  virtual void opened(const std::shared_ptr<ReadJob>& job, uint32_t first, uint32_t last) = 0;
  virtual Fetch fetch(const std::shared_ptr<ReadJob>& job, uint32_t item, Status& status, Source& source) = 0;
  virtual void sent(const std::shared_ptr<ReadJob>& job, uint32_t item) = 0;
  virtual void finished(ReadJob&) {}
};

class ReadService {
 public:
  using Wake = std::function<void(uint64_t conn, uint64_t serial)>;   // posts READ_DONE to the loop
  virtual ~ReadService() = default;
  virtual std::unique_ptr<ReadEngine> engine(Wake wake) = 0;
  virtual void stop() {}
  virtual const Arena* arena() const { return nullptr; }   // where its sources in memory lie, for devices to know it
};

std::unique_ptr<ReadService> buffered_reads();
std::unique_ptr<ReadEngine> buffered_engine();
// Null with `why` where this machine has no io_uring. Files that cannot be opened O_DIRECT are read buffered, counted.
std::unique_ptr<ReadService> direct_reads(ServerShared& shared, std::string& why);

// --- shared by the engines ---

// Bytes of head and checks of an opened shard.
inline uint64_t meta_bytes_of(const ReadRef& ref) { return ref.head_bytes + checks_bytes_of(uint32_t(ref.shard_bytes.size()), ref.block_count); }
// Takes head and checks as read from disk: are they whole, and of the very shard that was asked for? Then e.meta is set and accounted;
// else e.status says why not, and what is rotten is reported to the store.
void accept_meta(ReadJob& job, ExtentRead& e, std::vector<uint8_t> meta);
// Is this byte of a file in the page cache? Its neighbours then are, nearly always. Nothing where the kernel does not tell.
std::optional<bool> resident(int fd, uint64_t offset);
// Readahead of a piece, unless its last page is in memory.
void will_need(int fd, uint64_t offset, uint64_t bytes);
// Reads head and checks through the page cache and accepts them.
void load_meta(ReadJob& job, ExtentRead& e);
// The piece an item names, from the record's start; of an opened shard. BAD_REQUEST if it has no such plane or blocks.
Status locate(const ExtentRead& extent, uint32_t plane, uint64_t& offset, uint64_t& bytes);

}  // namespace kv
