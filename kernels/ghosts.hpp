// The ghost index: why something is no longer here. One append-only file a day, DIR/ghosts/<day>.ghost, kept 14 days.
//
//   16 B header { magic, version, day } | rows u64: upper 61 bits of xxh3-64(owner | extent key), lower 3 bits the reason
//
// Bounded: all files together stay below `bytes_max`, the oldest day goes first. A hint for people, never an answer to a read.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "index.hpp"

namespace kv {

inline constexpr uint64_t GHOST_MAGIC = 0x315453484753564bull;   // "KVSGHST1"
enum class GhostReason : uint8_t { UNKNOWN = 0, EXPIRED = 1, EVICTED = 2, WITHDRAWN = 3, CORRUPT = 4 };

class Ghosts {
 public:
  static constexpr uint32_t DAYS = 14;
  Ghosts(std::string dir, uint64_t bytes_max);
  ~Ghosts();
  Ghosts(const Ghosts&) = delete;
  Ghosts& operator=(const Ghosts&) = delete;

  void add(const std::vector<std::pair<GroupKey, GhostReason>>& gone, uint32_t day);
  // The newest reason for each key, UNKNOWN where there is none. Reads the files: for questions of people, not for every miss.
  std::vector<GhostReason> reasons(const std::vector<GroupKey>& keys);
  uint64_t bytes();
  uint64_t dropped();

 private:
  static uint64_t fingerprint(const GroupKey& key) { return XXH3_64bits(key.data(), key.size()) & ~7ull; }
  std::string path(uint32_t day) const { return dir_ + "/" + std::to_string(day) + ".ghost"; }
  bool open_day(uint32_t day);
  void expire(uint32_t today);

  const std::string dir_;
  const uint64_t bytes_max_;
  std::mutex mutex_;
  std::map<uint32_t, uint64_t> days_;   // -> file bytes
  int fd_ = -1;
  uint32_t fd_day_ = 0;
  uint64_t dropped_ = 0;
};

}  // namespace kv
