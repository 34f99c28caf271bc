// Small messages: one multiplexed connection per node, and calls that ask many nodes at once.
//
// A Call sends frames to several nodes and collects their answers; a thread waits for "enough". Answers that come after the waiter has left
// are taken in and forgotten: a late answer never blocks the next one. A frame once accepted is sent even when nobody waits any more.
#pragma once
#include <deque>
#include <span>
#include <unordered_set>

#include "client_net.hpp"
#include "walk.hpp"

namespace kv::client {

class SmallConn;

class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(std::shared_ptr<Net> net, Learnt& learnt) : net_(std::move(net)), learnt_(learnt) {}
  virtual ~Call() = default;
  // Waits until done() or the time has passed; true when done. Any thread, without the GIL.
  bool wait(int64_t timeout_ns);
  uint32_t pending() const;
  std::vector<uint32_t> owing(int64_t age_ns) const;   // nodes that have owed an answer for so long

 protected:
  friend class SmallConn;
  struct Slot {
    uint32_t node;
    int64_t sent_ns;
    bool answered = false;
  };
  // Queues one frame; its number is what on_answer will name. Call without the mutex.
  uint32_t send(uint32_t node, wire::Verb verb, const std::vector<uint8_t>& body);
  virtual void on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) = 0;   // mutex held
  virtual bool done_locked() const { return pending_ == 0; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const std::shared_ptr<Net> net_;
  Learnt& learnt_;   // of net_
  std::deque<Slot> slots_;
  uint32_t pending_ = 0;

 private:
  void answer(uint32_t slot, Outcome result, std::span<const uint8_t> body);
};

class SmallConn final : public Conn {
 public:
  SmallConn(Net& net, Node& node) : Conn(net, node, *net.small_loop, net.config.small_role) {}
  // The node's connection, made when there is none; null while the node is held for down.
  static std::shared_ptr<SmallConn> of(Net& net, Node& node);
  // Any thread. A failure is answered to the call like any other.
  void submit(wire::Verb verb, const std::vector<uint8_t>& body, std::shared_ptr<Call> call, uint32_t slot);
  bool on_sweep(int64_t now) override;

 protected:
  void on_read() override;
  void on_closed(Outcome why) override;

 private:
  static constexpr size_t OUT_BYTES_MAX = 4u << 20;
  struct Pending {
    std::shared_ptr<Call> call;
    uint32_t slot;
    int64_t sent_ns;
    uint8_t verb;
  };
  void answer(uint64_t request_id, uint8_t verb, Outcome result, std::span<const uint8_t> body);
  std::unordered_map<uint64_t, Pending> pending_;   // guarded by mutex_
  std::vector<uint8_t> in_;                         // loop thread
  size_t in_used_ = 0;
  int64_t last_used_ns_ = 0;
};

// Any frames to any nodes.
class RpcCall final : public Call {
 public:
  RpcCall(std::shared_ptr<Net> net, uint32_t need) : Call(net, net->small_delay), need_(need) {}
  void ask(uint32_t node, wire::Verb verb, const std::vector<uint8_t>& body) { send(node, verb, body); }
  struct Answer {
    Outcome result = outcome(Fault::CANCELLED);
    bool there = false;
    std::vector<uint8_t> body;
  };
  std::vector<Answer> answers() const;   // in the order asked

 protected:
  void on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) override;
  bool done_locked() const override { return pending_ == 0 || (need_ && good_ >= need_); }

 private:
  std::vector<Answer> answers_;
  uint32_t need_, good_ = 0;
};

// One writing of one extent as a lookup sees it. A row of the array Python gets; its dtype is asserted in kvstore/client/native.py.
struct Found {
  uint64_t write_id, write_epoch;
  uint32_t start;         // index of its first block among the caller's keys
  uint32_t match;         // leading blocks whose tags equal the caller's
  uint16_t depth;
  uint8_t fidelity, zero[5];
};
static_assert(sizeof(Found) == 32);

// What a writing must be for its bytes to be read by a client: of one layout, in one code, in the clear.
struct Readable {
  uint64_t layout_tag;
  uint32_t block_bytes, kv_group;
  uint8_t plane_count, k, m;
};

// An extent of a ticket (kvstore/client/ticket.py).
struct TicketExtent {
  wire::WritingName name;
  uint64_t write_epoch, absent;
  uint32_t first_block, count;
  uint16_t depth;
  uint8_t fidelity, zero[5];
};
static_assert(sizeof(TicketExtent) == 72);

// "Which extents start at these keys?" Keys are asked one node each, as the caller chooses, and asked again elsewhere as it sees fit.
class DiscoverCall final : public Call {
 public:
  DiscoverCall(std::shared_ptr<Net> net, const Owner& owner, uint64_t epoch, const uint8_t* keys, uint32_t count, const Readable& readable);
  static constexpr uint32_t KEYS_PER_FRAME = 512;
  // Asks nodes[i] for key indices[i]; batched per node, in the order of first use.
  // counted: done() waits for one more answer for each; otherwise these replace requests that failed or are late.
  void ask(const int32_t* indices, const int32_t* nodes, uint32_t count, bool counted);
  std::vector<Found> found() const;             // what can be read; rows stay what they are, later answers add some
  std::vector<uint32_t> earlier() const;
  std::vector<uint32_t> starts() const;         // of extents of this chain, as far as they are known, in order
  std::vector<uint8_t> answers() const;         // per key: nodes that looked at it
  // The walk over the first `rows` of what was found (those that its caller has looked at), without those of `refused` and what was
  // written in no epoch of `epochs`.
  struct Walk { std::vector<Piece> pieces; std::vector<uint32_t> starts; };   // and where the writings start that it chose from
  Walk walk(uint32_t rows, std::span<const uint64_t> epochs, std::span<const uint32_t> refused) const;
  std::vector<wire::WritingName> names(std::span<const uint32_t> rows) const;
  std::vector<TicketExtent> extents(std::span<const Piece> pieces, std::span<const uint64_t> absent) const;
  std::vector<int32_t> take_failed();           // keys of requests that failed since the last call
  std::vector<int32_t> unsettled() const;       // keys with fewer answers than wanted

 protected:
  void on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) override;
  bool done_locked() const override { return pending_ == 0 || unsettled_ == 0 || !failed_.empty(); }

 private:
  bool parse(const std::vector<int32_t>& asked, std::span<const uint8_t> body);
  bool reads(const wire::Writing& w) const;
  wire::WritingName name_of(const Found& found) const;
  const Owner owner_;
  const uint64_t epoch_;
  const Readable readable_;
  std::vector<uint8_t> keys_;
  std::vector<uint64_t> tags_;
  std::vector<std::vector<int32_t>> asked_;     // per slot
  std::vector<Found> found_;
  std::vector<uint32_t> earlier_;
  std::vector<uint8_t> answers_, wanted_;       // per key
  uint32_t unsettled_ = 0;                      // keys with fewer answers than wanted
  std::vector<int32_t> failed_;
  std::unordered_set<uint64_t> seen_;           // start and write id, mixed, of found_
};

// Promise and touch extents at the nodes of their lists; done when each has enough shards.
class PromiseCall final : public Call {
 public:
  struct Want {
    wire::PromiseRequest head;   // count is filled in
    const uint8_t* names;        // count x WritingName
    const int32_t* nodes;        // count x shards, -1: nobody
    uint32_t count, shards, need;
  };
  PromiseCall(std::shared_ptr<Net> net, const Want& want);
  void start();
  std::vector<uint64_t> masks() const;       // per extent: shards confirmed
  std::vector<uint64_t> answered() const;    // per extent: shards whose node has answered or failed
  std::vector<uint32_t> last_buckets() const;   // per extent: of its last use before this touch, the newest that a node tells; 0: none does

 protected:
  void on_answer(uint32_t slot, Outcome result, std::span<const uint8_t> body) override;
  bool done_locked() const override { return pending_ == 0 || short_ == 0; }

 private:
  const wire::PromiseRequest head_;
  const uint32_t count_, shards_, need_;
  std::vector<uint8_t> names_;
  std::vector<int32_t> nodes_;
  std::vector<std::vector<uint32_t>> asked_;   // per slot: extents
  std::vector<uint64_t> masks_, answered_;
  std::vector<uint32_t> last_buckets_;
  uint32_t short_;                             // extents with fewer than need
};

}  // namespace kv::client
