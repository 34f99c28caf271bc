#include "ghosts.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <unordered_map>

#include "segments.hpp"

namespace kv {

namespace {
struct GhostHeader { uint64_t magic; uint32_t version, day; };
static_assert(sizeof(GhostHeader) == 16);
}  // namespace

Ghosts::Ghosts(std::string dir, uint64_t bytes_max) : dir_(std::move(dir)), bytes_max_(bytes_max) {
  mkdir(dir_.c_str(), 0755);
  DIR* d = opendir(dir_.c_str());
  if (!d) throw std::runtime_error("cannot open " + dir_ + ": " + strerror(errno));
  while (const dirent* e = readdir(d)) {
    const std::string name = e->d_name;
    struct stat st{};
    if (name.size() > 6 && name.substr(name.size() - 6) == ".ghost" && stat((dir_ + "/" + name).c_str(), &st) == 0)
      days_[uint32_t(strtoul(name.c_str(), nullptr, 10))] = uint64_t(st.st_size);
  }
  closedir(d);
}

Ghosts::~Ghosts() {
  if (fd_ >= 0) ::close(fd_);
}

bool Ghosts::open_day(uint32_t day) {
  if (fd_ >= 0 && fd_day_ == day) return true;
  if (fd_ >= 0) ::close(fd_);
  fd_ = open(path(day).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) return false;
  fd_day_ = day;
  struct stat st{};
  if (fstat(fd_, &st) != 0) return false;
  uint64_t size = uint64_t(st.st_size);
  if (size < sizeof(GhostHeader)) {
    const GhostHeader header{GHOST_MAGIC, 1, day};
    if (!SegmentFiles::write_all(fd_, reinterpret_cast<const uint8_t*>(&header), sizeof header, 0)) return false;
    size = sizeof header;
  }
  days_[day] = size - size % 8;   // a torn last row is written over
  return true;
}

void Ghosts::expire(uint32_t today) {
  uint64_t total = 0;
  for (const auto& [day, bytes] : days_) total += bytes;
  while (!days_.empty() && days_.begin()->first != today && (days_.begin()->first + DAYS <= today || total > bytes_max_)) {
    total -= days_.begin()->second;
    unlink(path(days_.begin()->first).c_str());
    days_.erase(days_.begin());
  }
}

void Ghosts::add(const std::vector<std::pair<GroupKey, GhostReason>>& gone, uint32_t day) {
  if (gone.empty()) return;
  std::lock_guard lock(mutex_);
  if (!open_day(day)) {
    dropped_ += gone.size();
    return;
  }
  expire(day);
  std::vector<uint64_t> rows;
  for (const auto& [key, reason] : gone) rows.push_back(fingerprint(key) | uint64_t(reason));
  uint64_t& size = days_[day];
  if (size + 8 * rows.size() > bytes_max_ ||
      !SegmentFiles::write_all(fd_, reinterpret_cast<const uint8_t*>(rows.data()), 8 * rows.size(), size)) {
    dropped_ += rows.size();
    return;
  }
  size += 8 * rows.size();
}

std::vector<GhostReason> Ghosts::reasons(const std::vector<GroupKey>& keys) {
  std::lock_guard lock(mutex_);
  std::vector<GhostReason> out(keys.size(), GhostReason::UNKNOWN);
  std::unordered_map<uint64_t, GhostReason> wanted;
  for (const GroupKey& key : keys) wanted.emplace(fingerprint(key), GhostReason::UNKNOWN);
  std::vector<uint64_t> rows(1 << 16);
  for (const auto& [day, bytes] : days_) {   // oldest first: a later row wins
    const int fd = open(path(day).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    for (uint64_t at = sizeof(GhostHeader); at + 8 <= bytes;) {
      const uint64_t n = std::min<uint64_t>(rows.size(), (bytes - at) / 8);
      if (!SegmentFiles::read_all(fd, reinterpret_cast<uint8_t*>(rows.data()), 8 * n, at)) break;
      for (uint64_t i = 0; i < n; i++)
        if (const auto it = wanted.find(rows[i] & ~7ull); it != wanted.end()) it->second = GhostReason(rows[i] & 7);
      at += 8 * n;
    }
    ::close(fd);
  }
  for (size_t i = 0; i < keys.size(); i++) out[i] = wanted[fingerprint(keys[i])];
  return out;
}

uint64_t Ghosts::bytes() {
  std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [day, bytes] : days_) total += bytes;
  return total;
}

uint64_t Ghosts::dropped() {
  std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace kv
