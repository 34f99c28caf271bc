#include "segments.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace kv {

namespace {

constexpr uint64_t AHEAD_BYTES = 4 << 20;   // 60 us to ask for

uint64_t unix_ms() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return uint64_t(t.tv_sec) * 1000 + uint64_t(t.tv_nsec) / 1000000;
}

uint64_t footer_sum_of(const uint8_t* footer, size_t bytes) {
  XXH3_state_t s;
  XXH3_64bits_reset(&s);
  const uint64_t zero = 0;
  XXH3_64bits_update(&s, footer, bytes - 8);
  XXH3_64bits_update(&s, &zero, 8);
  return XXH3_64bits_digest(&s);
}
static_assert(offsetof(FooterTrailer, sum) == sizeof(FooterTrailer) - 8);

Status status_of_errno(int e) { return e == ENOSPC || e == EDQUOT || e == EFBIG ? Status::NO_SPACE : Status::IO_ERROR; }

}  // namespace

std::vector<uint8_t> build_footer(uint32_t segment, uint64_t data_end, uint64_t created_unix_ms,
                                  const std::vector<std::pair<uint32_t, std::vector<uint8_t>>>& entries) {
  std::vector<uint8_t> out;
  for (const auto& [offset_4k, head] : entries) {
    const FooterEntry entry{offset_4k, uint32_t(head.size())};
    const auto* p = reinterpret_cast<const uint8_t*>(&entry);
    out.insert(out.end(), p, p + sizeof entry);
    out.insert(out.end(), head.begin(), head.end());
  }
  out.resize(align_up(out.size() + sizeof(FooterTrailer), RECORD_ALIGN));
  FooterTrailer t{};
  t.magic = FOOTER_MAGIC;
  t.version = FOOTER_VERSION;
  t.segment = segment;
  t.count = uint32_t(entries.size());
  t.footer_offset = data_end;
  t.footer_bytes = out.size();
  t.created_unix_ms = created_unix_ms;
  std::memcpy(out.data() + out.size() - sizeof t, &t, sizeof t);
  t.sum = footer_sum_of(out.data(), out.size());
  std::memcpy(out.data() + out.size() - 8, &t.sum, 8);
  return out;
}

bool read_footer(int fd, uint32_t segment, FooterView& out) {
  struct stat st{};
  if (fstat(fd, &st) != 0 || st.st_size < RECORD_ALIGN || st.st_size % RECORD_ALIGN) return false;
  FooterTrailer t;
  const uint64_t size = uint64_t(st.st_size);
  if (!SegmentFiles::read_all(fd, reinterpret_cast<uint8_t*>(&t), sizeof t, size - sizeof t)) return false;
  if (t.magic != FOOTER_MAGIC || t.version != FOOTER_VERSION || t.segment != segment) return false;
  if (t.footer_bytes < sizeof t || t.footer_bytes > size) return false;
  if (t.footer_offset != size - t.footer_bytes || t.footer_offset % RECORD_ALIGN) return false;
  std::vector<uint8_t> bytes(t.footer_bytes);
  if (!SegmentFiles::read_all(fd, bytes.data(), bytes.size(), t.footer_offset)) return false;
  if (footer_sum_of(bytes.data(), bytes.size()) != t.sum) return false;
  out.data_end = t.footer_offset;
  out.entries.clear();
  size_t at = 0;
  for (uint32_t i = 0; i < t.count; i++) {
    FooterEntry e;
    if (at + sizeof e > bytes.size()) return false;
    std::memcpy(&e, bytes.data() + at, sizeof e);
    at += sizeof e;
    if (e.head_bytes % 8 || at + e.head_bytes > bytes.size()) return false;
    const std::vector<uint8_t> head(bytes.begin() + ptrdiff_t(at), bytes.begin() + ptrdiff_t(at + e.head_bytes));
    at += e.head_bytes;
    if (const Status status = check_head(head.data(), head.size()); status != Status::OK) {
      out.unknown += status == Status::BAD_VERSION;
      continue;
    }
    const uint64_t end = uint64_t(e.offset_4k) * RECORD_ALIGN + align_up(RecordView{head.data()}.head().record_bytes, RECORD_ALIGN);
    if (end <= t.footer_offset) out.entries.emplace_back(e.offset_4k, head);
  }
  return true;
}

// --- one file ---

Segment::~Segment() {
  if (fd_ >= 0) ::close(fd_), owner_.files_open_--;
  if (fd_direct_ >= 0) ::close(fd_direct_);
}

int Segment::hold() {
  bool opened = false;
  {
    std::lock_guard lock(mutex_);
    if (fd_ < 0) {
      fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (fd_ < 0) return -errno;
      owner_.files_open_++;
      opened = true;
    }
    holds_++;
  }
  if (opened) owner_.note_open(this);
  return 0;
}

void Segment::unhold() {
  std::lock_guard lock(mutex_);
  holds_--;
}

bool Segment::try_close() {
  std::lock_guard lock(mutex_);
  if (holds_ || fd_ < 0) return false;
  ::close(fd_), owner_.files_open_--;
  if (fd_direct_ >= 0) ::close(fd_direct_);
  fd_ = fd_direct_ = -1;
  return true;
}

int Segment::fd_direct() {
  std::lock_guard lock(mutex_);
  if (fd_direct_ < 0) fd_direct_ = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  return fd_direct_;
}

void Segment::begin_read(uint32_t offset_4k) {
  std::lock_guard lock(mutex_);
  reads_[offset_4k]++;
}

void Segment::end_read(uint32_t offset_4k) {
  std::lock_guard lock(mutex_);
  const auto it = reads_.find(offset_4k);
  if (it != reads_.end() && --it->second == 0) reads_.erase(it);
  holds_--;
}

bool Segment::is_read(uint32_t offset_4k) {
  std::lock_guard lock(mutex_);
  return reads_.contains(offset_4k);
}

bool Segment::is_held() {
  std::lock_guard lock(mutex_);
  return holds_ > 0;
}

// --- all files ---

SegmentFiles::SegmentFiles(std::string dir, uint64_t segment_bytes, bool sync_names)
    : dir_(std::move(dir)), segment_bytes_(segment_bytes), sync_names_(sync_names) {
  mkdir(dir_.c_str(), 0755);
  DIR* d = opendir(dir_.c_str());
  if (!d) throw std::runtime_error("cannot open " + dir_ + ": " + strerror(errno));
  while (const dirent* e = readdir(d)) {
    unsigned id;
    char end[4] = {};
    if (strlen(e->d_name) == 12 && sscanf(e->d_name, "%8x.%3s", &id, end) == 2 && !strcmp(end, "seg") && id > 0) {
      auto segment = std::make_shared<Segment>(*this, id, dir_ + "/" + e->d_name);
      segment->closing = true;   // files of an earlier run are never appended to
      table_[id] = std::move(segment);
      next_id_ = std::max(next_id_, id + 1);
    }
  }
  closedir(d);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) files_open_max_ = uint32_t(std::clamp<uint64_t>(files.rlim_cur / 4, 16, 4096));
  holes_visible_ = probe_holes();
}

bool SegmentFiles::probe_holes() const {
  const std::string path = dir_ + "/probe";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) throw std::runtime_error("cannot write to " + dir_ + ": " + strerror(errno));
  const std::vector<uint8_t> page(4 * RECORD_ALIGN, 1);
  const bool punched = write_all(fd, page.data(), page.size(), 0) && punch(fd, 0, 2 * RECORD_ALIGN) == 0;
  const bool seen = punched && lseek(fd, 0, SEEK_DATA) == 2 * RECORD_ALIGN;
  ::close(fd);
  unlink(path.c_str());
  return seen;
}

Status SegmentFiles::reserve(uint64_t padded_bytes, uint32_t head_bytes, std::shared_ptr<Segment>& segment, uint64_t& offset) {
  std::lock_guard lock(append_mutex_);
  const uint32_t in_footer = uint32_t(sizeof(FooterEntry)) + head_bytes;
  if (active_ && active_->append_at > 0 &&
      active_->append_at + padded_bytes + align_up(active_->footer_bytes + in_footer, RECORD_ALIGN) > segment_bytes_) {
    active_->closing = true;
    active_->unhold();
    active_.reset();
  }
  if (!active_) {
    char name[32];
    snprintf(name, sizeof name, "/%08x.seg", next_id_);
    auto fresh = std::make_shared<Segment>(*this, next_id_, dir_ + name);
    const int fd = open(fresh->path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return status_of_errno(errno);
    fresh->fd_ = fd;
    fresh->holds_ = 1;
    fresh->end_known = true;
    files_open_++;
    next_id_++;
    unsealed_.push_back(fresh);
    if (sync_names_) sync_directory();
    std::lock_guard table(table_mutex_);
    table_[fresh->id] = fresh;
    active_ = std::move(fresh);
  }
  segment = active_;
  segment->hold();
  segment->writers++;
  offset = segment->append_at;
  segment->append_at += padded_bytes;
  segment->footer_bytes += in_footer;
  if (segment->append_at > segment->allocated_to) {
    // Into blocks that are there already, the kernel takes a record with a quarter less work (docs/PERFORMANCE.md). A wish: where it
    // fails, blocks come with the writes.
    const uint64_t from = segment->allocated_to, to = std::min(segment->append_at + AHEAD_BYTES, std::max(segment_bytes_, segment->append_at));
    (void)!fallocate(segment->fd(), FALLOC_FL_KEEP_SIZE, off_t(from), off_t(to - from));
    segment->allocated_to = to;
  }
  return Status::OK;
}

uint64_t SegmentFiles::ahead_bytes() {
  std::lock_guard lock(append_mutex_);
  uint64_t bytes = 0;
  for (const auto& s : unsealed_) bytes += s->allocated_to > s->append_at ? s->allocated_to - s->append_at : 0;
  return bytes;
}

void SegmentFiles::give_back_ahead() {
  std::lock_guard lock(append_mutex_);
  if (!active_) return;
  const bool quiet = append_seen_ == active_->append_at && !active_->writers;
  append_seen_ = active_->append_at;
  if (quiet && active_->allocated_to > active_->append_at && ftruncate(active_->fd(), off_t(active_->append_at)) == 0)
    active_->allocated_to = active_->append_at;
}

void SegmentFiles::release(Segment& segment, uint64_t offset, bool committed) {
  std::lock_guard lock(append_mutex_);
  if (committed) segment.offsets_4k.push_back(uint32_t(offset / RECORD_ALIGN));
  segment.writers--;
  segment.unhold();
}

std::shared_ptr<Segment> SegmentFiles::find(uint32_t id) {
  std::lock_guard lock(table_mutex_);
  const auto it = table_.find(id);
  return it == table_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<Segment>> SegmentFiles::all() {
  std::lock_guard lock(table_mutex_);
  std::vector<std::shared_ptr<Segment>> out;
  for (const auto& [id, segment] : table_) out.push_back(segment);
  return out;
}

std::vector<std::shared_ptr<Segment>> SegmentFiles::to_seal() {
  std::vector<std::shared_ptr<Segment>> out;
  std::lock_guard lock(append_mutex_);
  for (const auto& s : unsealed_)
    if (s->closing && s->end_known && !s->writers && !s->sealed) out.push_back(s);
  return out;
}

std::vector<std::shared_ptr<Segment>> SegmentFiles::dirty() {
  std::vector<std::shared_ptr<Segment>> out;
  std::lock_guard lock(append_mutex_);
  for (const auto& s : unsealed_)
    if (s->dirty) out.push_back(s);
  return out;
}

void SegmentFiles::close_active() {
  std::lock_guard lock(append_mutex_);
  if (!active_) return;
  active_->closing = true;
  active_->unhold();
  active_.reset();
}

void SegmentFiles::sync_directory() const {
  const int fd = open(dir_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  ::close(fd);
}

Status SegmentFiles::seal(const std::shared_ptr<Segment>& shared) {
  Segment& segment = *shared;
  if (int rc = segment.hold()) return status_of_errno(-rc);
  Status status = Status::OK;
  std::vector<std::pair<uint32_t, std::vector<uint8_t>>> entries;
  std::sort(segment.offsets_4k.begin(), segment.offsets_4k.end());
  if (fdatasync(segment.fd()) != 0) status = status_of_errno(errno);
  std::vector<uint8_t> page(RECORD_ALIGN);
  for (uint32_t offset_4k : segment.offsets_4k) {
    if (status != Status::OK) break;
    // Punched since: not listed.
    if (!read_all(segment.fd(), page.data(), page.size(), uint64_t(offset_4k) * RECORD_ALIGN)) continue;
    if (check_head(page.data(), page.size()) != Status::OK) continue;
    entries.emplace_back(offset_4k, std::vector<uint8_t>(page.begin(), page.begin() + RecordView{page.data()}.head().head_bytes));
  }
  if (status == Status::OK) {
    const std::vector<uint8_t> footer = build_footer(segment.id, segment.append_at, unix_ms(), entries);
    if (!write_all(segment.fd(), footer.data(), footer.size(), segment.append_at) ||
        ftruncate(segment.fd(), off_t(segment.append_at + footer.size())) != 0 || fdatasync(segment.fd()) != 0)
      status = status_of_errno(errno);
  }
  if (status == Status::OK) {
    segment.dirty = false;
    segment.sealed = true;
    segment.offsets_4k = {};
  }
  segment.unhold();
  std::lock_guard lock(append_mutex_);
  std::erase(unsealed_, shared);
  if (status != Status::OK) unsealed_.push_back(shared);   // tried again
  return status;
}

void SegmentFiles::remove(const std::shared_ptr<Segment>& segment) {
  unlink(segment->path.c_str());
  {
    std::lock_guard lock(append_mutex_);
    std::erase(unsealed_, segment);
  }
  std::lock_guard lock(table_mutex_);
  table_.erase(segment->id);
}

uint64_t SegmentFiles::count() {
  std::lock_guard lock(table_mutex_);
  return table_.size();
}

uint32_t SegmentFiles::next_id() {
  std::lock_guard lock(append_mutex_);
  return next_id_;
}

bool SegmentFiles::has_writers(Segment& segment) {
  std::lock_guard lock(append_mutex_);
  return segment.writers > 0;
}

uint64_t SegmentFiles::disk_bytes() {
  uint64_t bytes = 0;
  for (const auto& s : all()) {
    struct stat st{};
    if (stat(s->path.c_str(), &st) == 0) bytes += uint64_t(st.st_blocks) * 512;
  }
  return bytes;
}

bool SegmentFiles::write_all(int fd, const uint8_t* bytes, uint64_t count, uint64_t offset) {
  while (count) {
    const ssize_t n = pwrite(fd, bytes, count, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (n == 0) errno = EIO;
      return false;
    }
    bytes += n, offset += uint64_t(n), count -= uint64_t(n);
  }
  return true;
}

bool SegmentFiles::read_all(int fd, uint8_t* bytes, uint64_t count, uint64_t offset) {
  while (count) {
    const ssize_t n = pread(fd, bytes, count, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (n == 0) errno = ENODATA;
      return false;
    }
    bytes += n, offset += uint64_t(n), count -= uint64_t(n);
  }
  return true;
}

void SegmentFiles::data_runs(int fd, uint64_t from, uint64_t to, const std::function<void(uint64_t, uint64_t)>& visit) {
  while (from < to) {
    const off_t begin = lseek(fd, off_t(from), SEEK_DATA);
    if (begin < 0) {
      if (errno == ENXIO) return;   // only holes to the end
      return visit(from, to);       // no such seek here: all may be data
    }
    if (uint64_t(begin) >= to) return;
    const off_t end = lseek(fd, begin, SEEK_HOLE);
    const uint64_t stop = end < 0 ? to : std::min<uint64_t>(uint64_t(end), to);
    visit(uint64_t(begin), stop);
    from = stop;
  }
}

int SegmentFiles::punch(int fd, uint64_t offset, uint64_t bytes) {
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(bytes)) == 0 ? 0 : errno;
}

void SegmentFiles::note_open(Segment* keep) {
  if (files_open_ <= files_open_max_) return;
  std::vector<std::shared_ptr<Segment>> segments = all();
  uint32_t tries = uint32_t(segments.size());
  while (tries-- && files_open_ > files_open_max_) {
    Segment& s = *segments[sweep_at_++ % segments.size()];
    if (&s != keep) s.try_close();
  }
}

}  // namespace kv
