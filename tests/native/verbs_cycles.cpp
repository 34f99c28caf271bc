// Both ends of kernels/verbs.hpp in one process, connected and destroyed again and again: a body arrives each time, nothing is left behind.
//
//   verbs_cycles CYCLES CLIENT_DEVICE DAEMON_DEVICE windows|registrations      exit 0: flat; 1: not, or wrong bytes, with a line that says so
#include <dirent.h>
#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "verbs.hpp"

namespace {
using namespace kv;

int cycle = 0;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "cycle %d: %s\n", cycle, what.c_str());
  std::exit(1);
}

ibv_wc wait_for_one(verbs::Endpoint& end, verbs::Endpoint* sender = nullptr) {
  ibv_wc wc;
  for (int i = 0; i < 3000; i++) {   // five minutes: an emulated clock leaps beside other work
    const int n = end.poll(&wc, 1);
    if (n < 0) fail("the completion queue is broken");
    if (n == 1) return wc;
    pollfd p{.fd = end.fd(), .events = POLLIN, .revents = 0};
    poll(&p, 1, 100);
    if (!end.listen()) fail("the completion channel is broken");
  }
  if (!sender) fail("no completion");
  fail("no completion; of the sender: " + (sender->poll(&wc, 1) == 1 ? "status " + std::to_string(wc.status) : std::string("none either")));
}

int64_t status_kib(const char* name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.rfind(name, 0) == 0) return std::atoll(line.c_str() + std::strlen(name) + 1);
  return -1;
}

int64_t descriptors() {
  DIR* dir = opendir("/proc/self/fd");
  int64_t n = 0;
  while (readdir(dir)) n++;
  closedir(dir);
  return n;
}

struct Held {
  int64_t fds, pinned_kib, registered, client_pairs, daemon_pairs, lost;
  bool operator==(const Held&) const = default;
};
}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) fail("verbs_cycles CYCLES CLIENT_DEVICE DAEMON_DEVICE windows|registrations");
  const int cycles = std::atoi(argv[1]);
  try {
    auto client = verbs::Device::open(argv[2]), daemon = verbs::Device::open(argv[3]);
    auto pool = std::make_shared<verbs::ZonePool>(client, 256 << 10, 4 << 20, std::string(argv[4]) == "windows");
    pool->prepare();
    Pages memory(64 << 10, Pages::Use::PINNED);
    verbs::Region region(daemon, memory.data(), memory.bytes(), 0);
    auto held = [&] {
      return Held{descriptors(), status_kib("VmPin:"), client->registered_bytes, client->queue_pairs, daemon->queue_pairs, client->lost_bytes};
    };
    Held before{};
    for (int i = 0; i < cycles; i++) {
      cycle = i;
      auto landing = verbs::Landing::create(pool, 16);
      if (!landing) fail("no zone");
      auto end = std::make_unique<verbs::Endpoint>(daemon, verbs::Depths{16, 1}, 0);
      std::string why;
      if (!verbs::valid_peer(landing->address(), true) || !verbs::valid_peer(end->address(), false)) fail("an address of ours is refused");
      if (!end->connect(landing->address(), why) || !landing->connect(end->address(), why)) fail(why);
      if (landing->by_window()) {
        const ibv_wc bound = wait_for_one(landing->endpoint());
        if (bound.status != IBV_WC_SUCCESS || bound.wr_id != verbs::Landing::BIND) fail("the window is not bound");
      }
      const uint32_t bytes = 1000 + uint32_t(i) % 60000;
      std::memset(memory.data(), i & 0xff, bytes);
      std::memset(landing->zone(), 0x5a, 64 << 10);
      ibv_sge part{reinterpret_cast<uint64_t>(memory.data()), bytes, region.lkey()};
      ibv_send_wr wr{};
      wr.sg_list = &part;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.imm_data = uint32_t(i);
      wr.wr.rdma.remote_addr = landing->address().zone_addr;
      wr.wr.rdma.rkey = landing->address().rkey;
      if (!end->post_send(&wr)) fail("the write is not taken");
      const ibv_wc told = wait_for_one(landing->endpoint(), end.get());
      if (told.status != IBV_WC_SUCCESS || told.opcode != IBV_WC_RECV_RDMA_WITH_IMM || told.imm_data != uint32_t(i)) fail("not what was written");
      const uint8_t* zone = landing->zone();
      if (zone[0] != (i & 0xff) || zone[bytes - 1] != (i & 0xff) || zone[bytes] != 0x5a) fail("wrong bytes");
      if (i % 2) landing.reset();   // either end goes first
      end.reset();
      landing.reset();
      if (i == std::min(20, cycles / 2)) before = held();
    }
    const Held after = held();
    std::printf("%d cycles: fds %ld -> %ld, pinned %ld -> %ld KiB, registered %ld -> %ld B, queue pairs %ld + %ld -> %ld + %ld, lost zones %ld B\n", cycles,
                long(before.fds), long(after.fds), long(before.pinned_kib), long(after.pinned_kib), long(before.registered), long(after.registered),
                long(before.client_pairs), long(before.daemon_pairs), long(after.client_pairs), long(after.daemon_pairs), long(after.lost));
    if (!(before == after) || after.client_pairs || after.daemon_pairs || after.lost) fail("something is left behind");
  } catch (const verbs::Fault& fault) {
    fail(std::string(fault.code) + " " + fault.what());
  }
  return 0;
}
