// Segment files: append-only, named DIR/segments/XXXXXXXX.seg by their number. docs/FORMAT.md is the text to this.
//
//   record | zero padding to 4 KiB | record | ...          holes where records were freed
//   footer, from a multiple of 4 KiB: count x { FooterEntry | head bytes }, zero padding, FooterTrailer at the file's last 64 bytes
//
// Invariants: a place is written once; a file with a valid footer is never written again, only punched; numbers are never reused.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "record.hpp"

namespace kv {

inline constexpr uint64_t FOOTER_MAGIC = 0x31544f4f4653564bull;  // "KVSFOOT1"
inline constexpr uint32_t FOOTER_VERSION = 1;

struct FooterEntry { uint32_t offset_4k, head_bytes; };
struct FooterTrailer {
  uint64_t magic;
  uint32_t version, segment, count, zero;
  uint64_t footer_offset;      // = end of the records, a multiple of 4 KiB
  uint64_t footer_bytes;       // entries, padding and this trailer
  uint64_t created_unix_ms;
  uint64_t reserved;
  uint64_t sum;                // xxh3-64 of the footer with this field zero
};
static_assert(sizeof(FooterEntry) == 8 && sizeof(FooterTrailer) == 64);

// The bytes of a footer over `entries` (offset/4096, head), for a file whose records end at `data_end`.
std::vector<uint8_t> build_footer(uint32_t segment, uint64_t data_end, uint64_t created_unix_ms,
                                  const std::vector<std::pair<uint32_t, std::vector<uint8_t>>>& entries);

struct FooterView {
  uint64_t data_end = 0;
  uint32_t unknown = 0;   // entries of another version, left out
  std::vector<std::pair<uint32_t, std::vector<uint8_t>>> entries;   // offset/4096, checked head
};
// False: no footer, or not a sound one.
bool read_footer(int fd, uint32_t segment, FooterView& out);

class SegmentFiles;

class Segment {
 public:
  Segment(SegmentFiles& owner, uint32_t number, std::string file) : id(number), path(std::move(file)), owner_(owner) {}
  ~Segment();

  // A hold keeps the file open. Negative errno when the file cannot be opened.
  int hold();
  void unhold();
  bool try_close();            // false: somebody holds it
  int fd() const { return fd_; }
  int fd_direct();             // O_DIRECT, opened on first use; -1 with errno. Only while held.
  void begin_read(uint32_t offset_4k);   // held already
  void end_read(uint32_t offset_4k);     // ends the hold too
  bool is_read(uint32_t offset_4k);
  bool is_held();

  const uint32_t id;
  const std::string path;

  // Guarded by the store's commit mutex.
  int64_t live_bytes = 0, live_records = 0;

  // Guarded by SegmentFiles' append mutex while the segment is being filled.
  uint64_t append_at = 0, footer_bytes = sizeof(FooterTrailer);
  uint32_t writers = 0;
  std::vector<uint32_t> offsets_4k;      // of committed records, for the footer
  bool closing = false;                  // takes no more records
  bool end_known = false;                // append_at and offsets_4k are right: it may get its footer
  uint64_t allocated_to = 0;             // blocks were asked for up to here, records or not
  std::atomic<bool> sealed{false};       // has its footer
  uint64_t footer_on_disk = 0;           // of a sealed one, once looked at; guarded by the store's free mutex
  std::atomic<bool> dirty{false};        // written since the last fdatasync

 private:
  friend class SegmentFiles;
  SegmentFiles& owner_;
  std::mutex mutex_;
  int fd_ = -1, fd_direct_ = -1;
  uint32_t holds_ = 0;
  std::unordered_map<uint32_t, uint32_t> reads_;
};

class SegmentFiles {
 public:
  // `sync_names`: a new file is in its directory before it is used. Throws std::runtime_error.
  SegmentFiles(std::string dir, uint64_t segment_bytes, bool sync_names);

  // Room for one record in the segment being filled. OK, NO_SPACE or IO_ERROR. On OK the segment is held until release().
  Status reserve(uint64_t padded_bytes, uint32_t head_bytes, std::shared_ptr<Segment>& segment, uint64_t& offset);
  void release(Segment& segment, uint64_t offset, bool committed);

  std::shared_ptr<Segment> find(uint32_t id);
  std::vector<std::shared_ptr<Segment>> all();
  std::vector<std::shared_ptr<Segment>> to_seal();         // closed, no writers, no footer yet
  std::vector<std::shared_ptr<Segment>> dirty();
  void close_active();                                     // the next record opens a new file
  uint64_t ahead_bytes();                                  // asked for, for records to come
  void give_back_ahead();                                  // of a file that took no record since the last call
  Status seal(const std::shared_ptr<Segment>& segment);    // data synced, footer written and synced
  void remove(const std::shared_ptr<Segment>& segment);    // unlinks the file
  uint64_t count();
  uint32_t next_id();
  bool has_writers(Segment& segment);
  uint64_t disk_bytes();                                   // allocated
  bool holes_visible() const { return holes_visible_; }    // SEEK_HOLE shows what was punched
  const std::string& dir() const { return dir_; }

  static bool write_all(int fd, const uint8_t* bytes, uint64_t count, uint64_t offset);   // false: errno
  static bool read_all(int fd, uint8_t* bytes, uint64_t count, uint64_t offset);          // false: errno; ENODATA: the file ends before
  // Calls visit(begin, end) for each run of allocated bytes in [from, to).
  static void data_runs(int fd, uint64_t from, uint64_t to, const std::function<void(uint64_t, uint64_t)>& visit);
  static int punch(int fd, uint64_t offset, uint64_t bytes);

 private:
  friend class Segment;
  bool probe_holes() const;
  void sync_directory() const;
  void note_open(Segment* segment);                        // closes the least used files past the limit

  const std::string dir_;
  const uint64_t segment_bytes_;
  const bool sync_names_;
  bool holes_visible_ = false;
  uint32_t files_open_max_ = 256;
  std::atomic<uint32_t> files_open_{0};
  std::mutex append_mutex_;
  std::shared_ptr<Segment> active_;
  uint64_t append_seen_ = 0;                              // of the active one, at the last give_back_ahead()
  std::vector<std::shared_ptr<Segment>> unsealed_;        // of this run, and those whose footer could not be written yet
  uint32_t next_id_ = 1;
  std::mutex table_mutex_;
  std::map<uint32_t, std::shared_ptr<Segment>> table_;
  std::atomic<uint32_t> sweep_at_{0};
};

}  // namespace kv
