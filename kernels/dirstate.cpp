#include "dirstate.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "common.hpp"

namespace kv {

namespace {

constexpr int FORMAT = 1;
constexpr const char* TITLE = "kvstore-data ";

std::string hex64(uint64_t v) {
  char buf[17];
  snprintf(buf, sizeof buf, "%016lx", static_cast<unsigned long>(v));
  return buf;
}

std::runtime_error os_error(const std::string& what, const std::string& path) {
  return std::runtime_error(what + " " + path + ": " + strerror(errno));
}

}  // namespace

DirLock::DirLock(const std::string& dir) {
  const std::string path = dir + "/LOCK";
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw os_error("cannot open", path);
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int why = errno;
    char text[32] = {};
    const ssize_t n = pread(fd_, text, sizeof text - 1, 0);
    ::close(fd_);
    errno = why;
    if (why != EWOULDBLOCK) throw os_error("cannot lock", path);
    throw DirectoryInUse(dir, n > 0 ? strtol(text, nullptr, 10) : 0);
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(fd_, 0) != 0 || pwrite(fd_, pid.data(), pid.size(), 0) != ssize_t(pid.size())) {
    const auto error = os_error("cannot write", path);
    ::close(fd_);
    throw error;
  }
}

DirLock::~DirLock() { ::close(fd_); }

StateRead read_state(const std::string& dir, DirState& out) {
  std::ifstream file(dir + "/state");
  if (!file) return StateRead::MISSING;
  std::stringstream whole;
  whole << file.rdbuf();
  const std::string text = whole.str();
  if (text.rfind(TITLE, 0) != 0) return StateRead::DAMAGED;
  const int version = atoi(text.c_str() + strlen(TITLE));
  if (version > FORMAT)
    throw std::runtime_error("data directory " + dir + " has format " + std::to_string(version) + ", this version reads up to " +
                             std::to_string(FORMAT));
  const size_t at = text.rfind("sum ");
  if (version < 1 || at == std::string::npos || text.substr(at) != "sum " + hex64(XXH3_64bits(text.data(), at)) + "\n")
    return StateRead::DAMAGED;
  std::istringstream lines(text.substr(0, at));
  std::string word, value;
  lines >> word >> value;
  while (lines >> word >> value) {
    if (word == "id") out.id = value;
    if (word == "boot") out.boot = value;
    if (word == "running") out.running = value == "1";
    if (word == "mode") out.strict = value == "strict";
    if (word == "filter") out.filter = strtoull(value.c_str(), nullptr, 16);
    if (word == "crashed_ms") out.crashed_ms = strtoull(value.c_str(), nullptr, 10);
  }
  return StateRead::OK;
}

void write_state(const std::string& dir, const DirState& state) {
  std::ostringstream text;
  text << TITLE << FORMAT << "\nid " << state.id << "\nboot " << state.boot << "\nrunning " << int(state.running) << "\nmode "
       << (state.strict ? "strict" : "relaxed") << "\ncrashed_ms " << state.crashed_ms << "\n";
  if (state.filter) text << "filter " << hex64(state.filter) << "\n";
  std::string body = text.str();
  body += "sum " + hex64(XXH3_64bits(body.data(), body.size())) + "\n";
  const std::string path = dir + "/state", draft = path + ".new";
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw os_error("cannot write", draft);
  const bool written = write(fd, body.data(), body.size()) == ssize_t(body.size()) && fsync(fd) == 0;
  ::close(fd);
  if (!written || rename(draft.c_str(), path.c_str()) != 0) throw os_error("cannot write", path);
  const int folder = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    ::close(folder);
  }
}

std::string machine_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.empty() ? "unknown" : id;
}

uint64_t boottime_ms() {
  timespec t{};
  clock_gettime(CLOCK_BOOTTIME, &t);
  return uint64_t(t.tv_sec) * 1000 + uint64_t(t.tv_nsec) / 1000000;
}

std::string random_hex(size_t bytes) {
  std::string out;
  for (size_t i = 0; i < bytes; i++) {
    uint8_t b = 0;
    if (getrandom(&b, 1, 0) != 1) throw std::runtime_error("no random bytes from the kernel");
    char two[3];
    snprintf(two, sizeof two, "%02x", b);
    out += two;
  }
  return out;
}

const char* name_of(StartMode mode) {
  switch (mode) {
    case StartMode::FRESH: return "fresh";
    case StartMode::CLEAN: return "clean";
    case StartMode::KILLED: return "killed";
    case StartMode::REBUILD: return "rebuild";
  }
  return "?";
}

}  // namespace kv
