// The ghost index: what is no longer here, and why. One append-only file a day, DIR/ghosts/<day>.ghost, kept 14 days.
//
//   16 B header { magic, version, day } | GhostRow, 80 B each
//
// A row is one writing that went: its extent key as a fingerprint, when it was last used, why it went, and one byte of each block's tag, by
// which a reader sees how far it equals a prompt. In RAM a table of 8 bytes a row says where a key's rows may be. Bounded: all files together
// stay below `bytes_max`, the oldest day goes first. A hint for people, never an answer to a read.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "index.hpp"

namespace kv {

inline constexpr uint64_t GHOST_MAGIC = 0x325453484753564bull;   // "KVSGHST2"
enum class GhostReason : uint8_t { UNKNOWN = 0, EXPIRED = 1, EVICTED = 2, WITHDRAWN = 3, CORRUPT = 4 };

struct GhostRow {
  uint64_t fingerprint;        // xxh3-64(owner | extent key)
  uint32_t last_bucket;        // of its last use
  uint8_t reason, retention_class;
  uint16_t block_count;
  uint8_t tags[BLOCKS_PER_EXTENT_MAX];   // lowest byte of each block's tag; zero beyond block_count
};
static_assert(sizeof(GhostRow) == 80);

class Ghosts {
 public:
  static constexpr uint32_t DAYS = 14;
  static constexpr uint32_t PER_KEY = 8;   // as many writings of one extent key as a node holds
  Ghosts(std::string dir, uint64_t bytes_max);
  ~Ghosts();
  Ghosts(const Ghosts&) = delete;
  Ghosts& operator=(const Ghosts&) = delete;

  static GhostRow row_of(const GroupKey& group, const EntryFixed& fixed, const uint8_t* tags, GhostReason reason);
  void add(const std::vector<GhostRow>& gone, uint32_t day);
  // Reads the rows that the files hold already into the table, a piece at a time; false when there is nothing left to read. Any thread;
  // until it is through, older rows are not found.
  bool load_some();
  // The newest rows of each key, newest first, at most PER_KEY: (index in `keys`, row).
  std::vector<std::pair<uint32_t, GhostRow>> find(const std::vector<GroupKey>& keys);
  uint64_t bytes();
  uint64_t dropped();

 private:
  struct Day {
    int fd = -1;
    uint64_t rows = 0;           // in the file
    uint64_t known = 0;          // of them in the table
    std::vector<uint64_t> table; // open addressing: upper 40 bits of the fingerprint | row + 1 in the lower 24; 0 is free
  };
  static constexpr uint64_t ROWS_MAX = (1u << 24) - 2;   // of a day, by the table's width
  static uint64_t fingerprint(const GroupKey& key) { return XXH3_64bits(key.data(), key.size()); }
  std::string path(uint32_t day) const { return dir_ + "/" + std::to_string(day) + ".ghost"; }
  bool open_day(uint32_t number, bool create);
  void expire(uint32_t today);
  void remove_first();
  static void learn(Day& day, const GhostRow* rows, uint64_t count);
  uint64_t bytes_locked() const;

  const std::string dir_;
  const uint64_t bytes_max_;
  std::mutex mutex_;
  std::map<uint32_t, Day> days_;
  uint64_t dropped_ = 0;
};

}  // namespace kv
