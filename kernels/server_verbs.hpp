// The daemon's end of RDMA: answers to VERBS_READ are written into the client's landing zone. docs/PROTOCOL.md (RDMA) is the text.
//
// Queue pairs are made and unmade by threads of their own (what waits on a device, or on the way to a peer, never waits in a loop), used by
// the bulk loop of their connection. Memory is registered at start, for local reads only: the direct engine's arena, and a pool in each bulk loop through which
// goes what lies elsewhere (checks, small pieces, the page cache). It returns to its owner when the device has said that it is done with
// it (a completion), or when the queue pair is gone.
#pragma once
#include <optional>

#include "io_engine.hpp"
#include "verbs.hpp"

namespace kv {

class VerbsServer {
 public:
  explicit VerbsServer(const ServerConfig& config);   // verbs::Fault
  void share(const Arena& arena);                     // registers it; verbs::Fault. Before the threads start
  void close();                                       // after the loops: queue pairs are gone, and what was registered is let go
  const ibv_mr* region_of(const uint8_t* at) const;   // null: not registered
  // OK: an endpoint that may write to `peer`. May wait a second for the way there.
  Status connect(const wire::VerbsOpen& peer, std::shared_ptr<verbs::Endpoint>& endpoint);

  const std::shared_ptr<verbs::Device> device;
  const uint64_t pool_bytes;      // of each bulk loop
  const uint32_t pairs_max;
  verbs::SetUps set_ups;   // make queue pairs
  verbs::Worker worker;    // unmakes them

 private:
  std::mutex making_;      // so that no more are made than may be
  std::vector<std::unique_ptr<verbs::Region>> regions_;
};

struct VerbsPlace { uint32_t bytes, offset; };   // of an item: the length that the client expects, and where in its zone

// Of a connection with an open zone. The work requests posted on it and not known to be done are in `posted`, oldest first.
struct VerbsState {
  struct Posted {
    Arena::Buffer buffer;       // what it reads from the pool
    uint32_t bytes = 0;
    bool item_end = false;
  };
  std::shared_ptr<verbs::Endpoint> endpoint;
  wire::VerbsOpen peer{};       // its zone
  uint32_t credits = 0;         // receive requests of the peer's that nothing was sent to
  std::deque<Posted> posted;
  uint64_t first_seq = 0;       // of posted.front(); a completion's wr_id is the number of its request
  uint32_t unsignalled = 0;     // of posted: at its end
  uint64_t flying_bytes = 0;    // of posted
  bool starved = false;         // waits for the peer: credits, or completions
  // The item being posted.
  std::shared_ptr<ReadJob> job; // of the front request; keeps what `posted` reads
  uint32_t item = 0;            // of that job: the next to post
  bool open = false;
  Source source;                // of the item's pieces: what is left of it
  uint64_t at = 0;              // of its body: posted
};

}  // namespace kv
