// What loopback TCP moves at all: N sender processes, each from one hot buffer, to one receiving process with two threads.
//
//   loopback SENDERS BYTES_PER_SENDER [full|part [CONGESTION_CONTROL]]
//
// Reads lines from stdin; each `go` line is one round: every sender sends BYTES_PER_SENDER, one output line `SECONDS BYTES` follows.
// So a caller can interleave rounds with rounds of its own. With `full` the receiver writes every byte to its own place (as a load
// has to) instead of into one buffer per thread that stays in cache. Without a congestion control, the host's. Ends at end of input; senders end with their connection.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t CHUNK = 729088;   // one data shard of a full extent: 64 blocks x 11,392 B
constexpr int THREADS = 2;

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

const char* congestion_control = nullptr;

int tcp_socket() {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (congestion_control && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion_control, socklen_t(std::strlen(congestion_control))))
    die(congestion_control);
  return fd;
}

[[noreturn]] void sender(uint16_t port, size_t round_bytes) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int fd = tcp_socket();
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at)) die("connect");
  std::vector<char> hot(CHUNK, 'x');
  char go;
  while (read(fd, &go, 1) == 1) {
    for (size_t left = round_bytes; left;) {
      ssize_t n = send(fd, hot.data(), std::min(left, CHUNK), MSG_NOSIGNAL);
      if (n < 0) std::_Exit(0);
      left -= size_t(n);
    }
  }
  std::_Exit(0);
}

struct Connection { int fd; char* place; size_t got; };

// Receives one round of `mine` and returns when every connection has delivered its bytes.
void receive(int epoll, std::vector<Connection>& mine, size_t round_bytes, char* scratch, bool full) {
  size_t open = mine.size();
  for (auto& c : mine) c.got = 0;
  epoll_event events[64];
  while (open) {
    int n = epoll_wait(epoll, events, 64, -1);
    for (int i = 0; i < n; i++) {
      auto& c = *static_cast<Connection*>(events[i].data.ptr);
      ssize_t r = recv(c.fd, full ? c.place + c.got : scratch, std::min(round_bytes - c.got, CHUNK), MSG_DONTWAIT);
      if (r == 0) die("a sender ended");
      if (r < 0) {
        if (errno == EAGAIN || errno == EINTR) continue;
        die("recv");
      }
      c.got += size_t(r);
      if (c.got == round_bytes) open--;
    }
  }
}

char* mapped(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED) die("mmap");
  return static_cast<char*>(p);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: loopback SENDERS BYTES_PER_SENDER [full|part [CONGESTION_CONTROL]]\n");
    return 2;
  }
  const int senders = std::atoi(argv[1]);
  const size_t round_bytes = std::strtoull(argv[2], nullptr, 10);
  const bool full = argc > 3 && !std::strcmp(argv[3], "full");
  if (argc > 4) congestion_control = argv[4];
  int listener = tcp_socket();
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t at_bytes = sizeof at;
  if (bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at) || listen(listener, senders) ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&at), &at_bytes)) {
    die("listen");
  }
  for (int i = 0; i < senders; i++) {
    if (fork() == 0) {
      close(listener);
      sender(ntohs(at.sin_port), round_bytes);
    }
  }
  std::vector<Connection> part[THREADS];
  int epolls[THREADS];
  for (int t = 0; t < THREADS; t++) {
    epolls[t] = epoll_create1(0);
    part[t].reserve(size_t(senders));   // epoll holds pointers into it
  }
  char* place = full ? mapped(round_bytes * size_t(senders)) : nullptr;
  for (int i = 0; i < senders; i++) {
    int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) die("accept");
    auto& mine = part[i % THREADS];
    mine.push_back({fd, full ? place + round_bytes * size_t(i) : nullptr, 0});
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.ptr = &mine.back();
    epoll_ctl(epolls[i % THREADS], EPOLL_CTL_ADD, fd, &e);
  }
  close(listener);

  std::barrier meet(THREADS);
  std::atomic<bool> ending{false};
  char* scratch[THREADS] = {mapped(CHUNK), mapped(CHUNK)};
  std::thread second([&] {
    for (;;) {
      meet.arrive_and_wait();
      if (ending) return;
      receive(epolls[1], part[1], round_bytes, scratch[1], full);
      meet.arrive_and_wait();
    }
  });
  char line[64];
  while (std::fgets(line, sizeof line, stdin)) {
    auto begin = std::chrono::steady_clock::now();
    for (auto& mine : part)
      for (auto& c : mine)
        if (write(c.fd, "g", 1) != 1) die("write");
    meet.arrive_and_wait();
    receive(epolls[0], part[0], round_bytes, scratch[0], full);
    meet.arrive_and_wait();
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%.9f %zu\n", took.count(), round_bytes * size_t(senders));
    std::fflush(stdout);
  }
  ending = true;
  meet.arrive_and_wait();
  second.join();
  for (auto& mine : part)
    for (auto& c : mine) close(c.fd);
  while (wait(nullptr) > 0) {}
}
