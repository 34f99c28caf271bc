// The server of one storage daemon: speaks kernels/wire.hpp, stands on kernels/store.hpp. docs/PROTOCOL.md is the text to it.
//
// Threads, each with what it alone touches:
//   small  x 1   accepts, greets (server_front.cpp), and answers DISCOVER, PROMISE, WITHDRAW, WHY, ADMIT, SUSPECT inline (server_small.cpp)
//   bulk   x n   READ (server_bulk.cpp)
//   records x n  WRITE (likewise): receives, checks, writes, commits; the disk or a commit never stalls a read
//   direct x 1   with the direct engine only: the io_uring (io_direct.cpp)
// They talk by messages to a loop's inbox that name a connection by number, so that a dead one is simply not found.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "server_arena.hpp"
#include "server_shared.hpp"
#include "store.hpp"
#include "verbs_route.hpp"

namespace kv {

struct ServerConfig : FrontConfig {
  uint32_t bucket_seconds = 60;
  std::string io = "buffered";                    // or "direct", "auto"
  uint32_t bulk_threads = 2, write_threads = 4;   // that send what is read; that receive records and write them
  uint64_t write_arena_bytes = 96ull << 20;       // records being received, all connections; past it BUSY
  uint64_t read_head_bytes_max = 64ull << 20;     // heads and checks held for READs, all connections; past it BUSY items
  uint64_t read_arena_bytes = 32ull << 20;        // direct engine: reads in flight or not yet sent
  uint64_t read_cache_bytes = 64ull << 20;        // direct engine: what was read twice
  std::string rdma_device = "off";                // or "auto", or a name
  verbs::Route rdma_route;
  uint64_t rdma_pool_bytes = 16ull << 20;         // registered: through it goes what lies outside the direct engine's memory
  uint32_t rdma_pairs_max = 1024;                 // queue pairs; past it BUSY, and the client stays on TCP
  uint32_t read_depth = 8;                        // direct engine: reads at the disk at once
};

class ReadService;
class SmallLoop;
class BulkLoop;
class VerbsServer;

// What all threads of a server share. Nothing in it changes after start but the atomics.
struct ServerShared : FrontShared {
  ServerShared(Store& s, const ServerConfig& c) : FrontShared(c), store(s), config(c), arena(c.write_arena_bytes) {}
  Store& store;
  const ServerConfig config;
  Arena arena;
  VerbsServer* verbs = nullptr;              // null: no RDMA
  std::atomic<uint64_t> read_ask_bytes{0};   // held for READ requests: what they ask for
};

class Server {
 public:
  // Binds, listens and starts the threads. std::system_error with the bind's errno; verbs::Fault where a device was named that cannot be
  // had. The store must outlive this.
  Server(Store& store, const ServerConfig& config);
  ~Server();   // stop()

  uint16_t port() const { return port_; }
  uint64_t boot_id() const { return shared_.boot_id; }
  const std::string& io() const { return io_; }             // the engine in use
  const std::string& io_note() const { return io_note_; }   // why not the one asked for; else empty
  std::string rdma() const;                                 // the device in use; else empty
  const std::string& rdma_note() const { return rdma_note_; }   // why none, code first; else empty
  ServerShared& shared() { return shared_; }
  void set_epoch(uint64_t epoch) { shared_.epoch.store(epoch); }
  // Stops accepting, answers DRAINING to all but READ, waits until nothing is in flight. False: the time was over first.
  bool drain(double timeout_seconds);
  void stop();   // closes every connection, ends the threads; harmless twice

 private:
  ServerShared shared_;
  uint16_t port_ = 0;
  std::string io_, io_note_, rdma_note_;
  std::unique_ptr<VerbsServer> verbs_;
  std::unique_ptr<ReadService> reads_;
  std::vector<std::unique_ptr<BulkLoop>> bulk_;
  std::vector<std::unique_ptr<BulkLoop>> records_;   // one for each write thread
  std::unique_ptr<SmallLoop> small_;
};

}  // namespace kv
