// What the disk gives a bare io_uring loop: O_DIRECT reads of a list of places, `depth` in flight, into huge-page buffers.
//
//   uring LIST          LIST: one read a line, `OFFSET BYTES PATH`, both numbers multiples of 4096
//
// Reads lines from stdin; each line is a depth (1 to 64) and gives one output line `SECONDS BYTES`: the whole list read once.
// Reads longer than a full extent's shard are cut, as a daemon would not read more at once either.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr size_t CHUNK = 733184;   // one record of a full extent: 729,088 B of shard with head and checks, 4 KiB-aligned
constexpr size_t SLOT = 1 << 20;
constexpr unsigned DEPTH_MAX = 64;

struct Read { int fd; uint64_t offset; uint32_t bytes; };

[[noreturn]] void die(const char* what, int error) {
  std::fprintf(stderr, "%s: %s\n", what, std::strerror(error));
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: uring LIST\n");
    return 2;
  }
  std::FILE* list = std::fopen(argv[1], "r");
  if (!list) die(argv[1], errno);
  std::map<std::string, int> files;
  std::vector<Read> reads;
  uint64_t total = 0;
  char line[4096];
  while (std::fgets(line, sizeof line, list)) {
    char* rest;
    uint64_t offset = std::strtoull(line, &rest, 10);
    uint64_t bytes = std::strtoull(rest, &rest, 10);
    std::string path(rest + 1);
    while (!path.empty() && path.back() == '\n') path.pop_back();
    auto [it, fresh] = files.try_emplace(path, -1);
    if (fresh && (it->second = open(path.c_str(), O_RDONLY | O_DIRECT)) < 0) die(path.c_str(), errno);
    total += bytes;
    for (uint64_t at = 0; at < bytes; at += CHUNK) reads.push_back({it->second, offset + at, uint32_t(std::min<uint64_t>(CHUNK, bytes - at))});
  }
  std::fclose(list);

  char* memory = static_cast<char*>(mmap(nullptr, SLOT * (DEPTH_MAX + 2), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) die("mmap", errno);
  memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + (2u << 20) - 1) & ~uintptr_t((2u << 20) - 1));
  madvise(memory, SLOT * DEPTH_MAX, MADV_HUGEPAGE);
  std::memset(memory, 0, SLOT * DEPTH_MAX);

  io_uring ring;
  if (int r = io_uring_queue_init(DEPTH_MAX, &ring, 0); r < 0) die("io_uring", -r);
  while (std::fgets(line, sizeof line, stdin)) {
    unsigned depth = unsigned(std::atoi(line));
    if (depth < 1 || depth > DEPTH_MAX) die("depth", EINVAL);
    std::vector<unsigned> slots;
    for (unsigned s = 0; s < depth; s++) slots.push_back(s);
    auto begin = std::chrono::steady_clock::now();
    size_t next = 0, done = 0;
    while (done < reads.size()) {
      for (; next < reads.size() && !slots.empty(); next++) {
        io_uring_sqe* e = io_uring_get_sqe(&ring);
        unsigned slot = slots.back();
        slots.pop_back();
        io_uring_prep_read(e, reads[next].fd, memory + SLOT * slot, reads[next].bytes, reads[next].offset);
        io_uring_sqe_set_data64(e, uint64_t(next) << 32 | slot);
      }
      if (int r = io_uring_submit_and_wait(&ring, 1); r < 0) die("io_uring_submit", -r);
      io_uring_cqe* c;
      while (io_uring_peek_cqe(&ring, &c) == 0) {
        uint64_t tag = io_uring_cqe_get_data64(c);
        if (c->res != int(reads[tag >> 32].bytes)) die("read", c->res < 0 ? -c->res : EIO);
        slots.push_back(unsigned(tag));
        io_uring_cqe_seen(&ring, c);
        done++;
      }
    }
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%.9f %llu\n", took.count(), static_cast<unsigned long long>(total));
    std::fflush(stdout);
  }
  io_uring_queue_exit(&ring);
}
