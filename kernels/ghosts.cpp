#include "ghosts.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "segments.hpp"

namespace kv {

namespace {
struct GhostHeader { uint64_t magic; uint32_t version, day; };
static_assert(sizeof(GhostHeader) == 16);
constexpr uint32_t VERSION = 2;
constexpr uint64_t ROWS_AT_ONCE = 8192;   // 640 kB under the mutex

uint64_t offset_of(uint64_t row) { return sizeof(GhostHeader) + row * sizeof(GhostRow); }
}  // namespace

Ghosts::Ghosts(std::string dir, uint64_t bytes_max) : dir_(std::move(dir)), bytes_max_(bytes_max) {
  mkdir(dir_.c_str(), 0755);
  DIR* d = opendir(dir_.c_str());
  if (!d) throw std::runtime_error("cannot open " + dir_ + ": " + strerror(errno));
  std::vector<uint32_t> found;
  while (const dirent* e = readdir(d)) {
    const std::string name = e->d_name;
    char* end = nullptr;
    const unsigned long day = strtoul(name.c_str(), &end, 10);
    if (end != name.c_str() && std::string(end) == ".ghost" && day <= UINT32_MAX) found.push_back(uint32_t(day));
  }
  closedir(d);
  for (const uint32_t day : found) open_day(day, false);
  while (days_.size() > 1 && bytes_locked() > bytes_max_) remove_first();
}

Ghosts::~Ghosts() {
  for (const auto& [number, day] : days_) ::close(day.fd);
}

// Opens a day's file; one of another format, or of none, is thrown away: it is a hint.
bool Ghosts::open_day(uint32_t number, bool create) {
  if (days_.contains(number)) return true;
  Day day;
  day.fd = open(path(number).c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
  if (day.fd < 0) return false;
  struct stat st{};
  GhostHeader header{};
  const bool sound = fstat(day.fd, &st) == 0 && uint64_t(st.st_size) >= sizeof header &&
                     SegmentFiles::read_all(day.fd, reinterpret_cast<uint8_t*>(&header), sizeof header, 0) && header.magic == GHOST_MAGIC &&
                     header.version == VERSION && header.day == number;
  if (sound) {
    // A torn last row is written over, and so is what a file holds past its limit.
    day.rows = std::min((uint64_t(st.st_size) - sizeof header) / sizeof(GhostRow), (bytes_max_ - sizeof header) / sizeof(GhostRow));
  } else {
    header = {GHOST_MAGIC, VERSION, number};
    if (!create || ftruncate(day.fd, 0) != 0 || !SegmentFiles::write_all(day.fd, reinterpret_cast<const uint8_t*>(&header), sizeof header, 0)) {
      ::close(day.fd);
      if (!create) unlink(path(number).c_str());
      return false;
    }
  }
  days_.emplace(number, std::move(day));
  return true;
}

uint64_t Ghosts::bytes_locked() const {
  uint64_t total = 0;
  for (const auto& [number, day] : days_) total += offset_of(day.rows);
  return total;
}

void Ghosts::expire(uint32_t today) {
  while (!days_.empty() && days_.begin()->first != today && (days_.begin()->first + DAYS <= today || bytes_locked() > bytes_max_)) remove_first();
}

void Ghosts::remove_first() {
  ::close(days_.begin()->second.fd);
  unlink(path(days_.begin()->first).c_str());
  days_.erase(days_.begin());
}

GhostRow Ghosts::row_of(const GroupKey& group, const EntryFixed& fixed, const uint8_t* tags, GhostReason reason) {
  GhostRow row{fingerprint(group), fixed.bucket, uint8_t(reason), fixed.retention_class, fixed.block_count, {}};
  for (uint32_t b = 0; b < std::min<uint32_t>(fixed.block_count, BLOCKS_PER_EXTENT_MAX); b++) row.tags[b] = tags[8 * b];
  return row;
}

void Ghosts::learn(Day& day, const GhostRow* rows, uint64_t count) {
  const auto put = [](std::vector<uint64_t>& table, uint64_t slot) {
    uint64_t at = (slot >> 24) * 0x9E3779B97F4A7C15ull >> 20 & (table.size() - 1);
    uint64_t* oldest = nullptr;
    for (uint32_t same = 0; table[at]; at = (at + 1) & (table.size() - 1)) {
      if (table[at] >> 24 != slot >> 24) continue;
      if (!oldest || table[at] < *oldest) oldest = &table[at];
      if (++same < PER_KEY) continue;
      if (*oldest < slot) *oldest = slot;   // no answer holds more: a key that comes and goes all day would make every step longer
      return;
    }
    table[at] = slot;
  };
  if ((day.known + count) * 3 > day.table.size() * 2) {
    size_t size = std::max<size_t>(day.table.size(), 1024);
    while ((day.known + count) * 3 > size * 2) size *= 2;
    std::vector<uint64_t> larger(size);
    for (const uint64_t slot : day.table)
      if (slot) put(larger, slot);
    day.table.swap(larger);
  }
  for (uint64_t i = 0; i < count; i++) put(day.table, (rows[i].fingerprint & ~0xFFFFFFull) | (day.known + i + 1));
  day.known += count;
}

void Ghosts::add(const std::vector<GhostRow>& gone, uint32_t number) {
  if (gone.empty()) return;
  std::lock_guard lock(mutex_);
  if (!open_day(number, true)) {
    dropped_ += gone.size();
    return;
  }
  expire(number);
  Day& day = days_[number];
  const uint64_t bytes = gone.size() * sizeof(GhostRow);
  if (day.rows + gone.size() > ROWS_MAX || offset_of(day.rows) + bytes > bytes_max_ ||
      !SegmentFiles::write_all(day.fd, reinterpret_cast<const uint8_t*>(gone.data()), bytes, offset_of(day.rows))) {
    dropped_ += gone.size();
    return;
  }
  if (day.known == day.rows) learn(day, gone.data(), gone.size());
  day.rows += gone.size();
}

bool Ghosts::load_some() {
  std::lock_guard lock(mutex_);
  for (auto at = days_.rbegin(); at != days_.rend(); ++at) {   // newest first: those are asked about most
    Day& day = at->second;
    if (day.known >= std::min(day.rows, ROWS_MAX)) continue;
    std::vector<GhostRow> rows(std::min(ROWS_AT_ONCE, std::min(day.rows, ROWS_MAX) - day.known));
    if (SegmentFiles::read_all(day.fd, reinterpret_cast<uint8_t*>(rows.data()), rows.size() * sizeof(GhostRow), offset_of(day.known)))
      learn(day, rows.data(), rows.size());
    else
      day.rows = day.known;   // what cannot be read is not there
    return true;
  }
  return false;
}

std::vector<std::pair<uint32_t, GhostRow>> Ghosts::find(const std::vector<GroupKey>& keys) {
  std::vector<std::pair<uint32_t, GhostRow>> out;
  std::vector<uint64_t> rows;
  std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < keys.size(); i++) {
    const uint64_t wanted = fingerprint(keys[i]);
    uint32_t left = PER_KEY;
    for (auto at = days_.rbegin(); at != days_.rend() && left; ++at) {
      const Day& day = at->second;
      if (day.table.empty()) continue;
      rows.clear();
      const uint64_t mask = day.table.size() - 1;
      for (uint64_t slot = (wanted >> 24) * 0x9E3779B97F4A7C15ull >> 20 & mask; day.table[slot]; slot = (slot + 1) & mask)
        if (day.table[slot] >> 24 == wanted >> 24) rows.push_back((day.table[slot] & 0xFFFFFF) - 1);
      std::sort(rows.rbegin(), rows.rend());
      for (const uint64_t number : rows) {
        GhostRow row;
        if (!SegmentFiles::read_all(day.fd, reinterpret_cast<uint8_t*>(&row), sizeof row, offset_of(number))) continue;
        if (row.fingerprint != wanted || row.block_count > BLOCKS_PER_EXTENT_MAX) continue;
        out.emplace_back(i, row);
        if (--left == 0) break;
      }
    }
  }
  return out;
}

uint64_t Ghosts::bytes() {
  std::lock_guard lock(mutex_);
  return bytes_locked();
}

uint64_t Ghosts::dropped() {
  std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace kv
