// Who holds a data directory, and how it was left: LOCK (flock, the holder's pid) and state (text, replaced atomically).
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kv {

struct DirectoryInUse : std::runtime_error {
  DirectoryInUse(const std::string& dir, long holder)
      : std::runtime_error("data directory " + dir + " is in use by pid " + std::to_string(holder)), pid(holder), directory(dir) {}
  long pid;
  std::string directory;
};

// Exclusive flock on DIR/LOCK for the life of this object. Throws DirectoryInUse.
class DirLock {
 public:
  explicit DirLock(const std::string& dir);
  ~DirLock();
  DirLock(const DirLock&) = delete;
  DirLock& operator=(const DirLock&) = delete;

 private:
  int fd_ = -1;
};

struct DirState {
  std::string id;              // 32 hex digits, drawn when the directory was made
  std::string boot;            // boot id of the machine when this was written
  bool running = false;        // no clean stop since
  bool strict = false;         // index commits were durable
  uint64_t crashed_ms = 0;     // boot-time clock of the last start that followed an unclean stop; 0: none
  uint64_t filter = 0;         // the `stop` of the filter file that belongs to this very state; 0: none
};

enum class StateRead { OK, MISSING, DAMAGED };
// Throws std::runtime_error when the directory was written by a newer format.
StateRead read_state(const std::string& dir, DirState& out);
void write_state(const std::string& dir, const DirState& state);   // throws std::runtime_error
std::string machine_boot_id();
uint64_t boottime_ms();
std::string random_hex(size_t bytes);   // throws std::runtime_error

enum class StartMode {
  FRESH,     // nothing there
  CLEAN,     // stopped cleanly: the index is right
  KILLED,    // the process died, the machine did not: the index is right, tails may hold bytes nobody owns
  REBUILD,   // power loss, damage, or two crashes in a minute: the index is rebuilt from the segments
};
const char* name_of(StartMode mode);

}  // namespace kv
