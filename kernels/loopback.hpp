// RDMA to oneself: a NIC copies pieces from host RAM into registered memory of this host, a GPU's included, and back.
//
// Two queue pairs of one device, joined to each other; pieces go as RDMA WRITEs of the first into memory that the second may write to, and
// behind those of each copy() a mark: an RDMA WRITE WITH IMMEDIATE of no bytes. That a write was acknowledged frees its place in the queue
// and tells no more; that the second was told of a mark means that all writes before it are in place.
//
//   posted_    given to the device; requests are numbered from 1
//   sent_      up to here they were acknowledged: of each chain of SIGNAL_EVERY the last is signalled, and each mark
//   arrived_   up to here they are in place: the last mark that the second was told of; marks_ are those after it
//
// A number to wait for also holds which pair of queues it was of: after a failure the next copy() joins new ones. Any thread.
//
// Fence: settle() waits for what was posted; after a failure, or when its time is over, it resets both queue pairs: once ibv_modify_qp has
// returned nothing is read or written for them. Where the device refuses even that, settle() says so and the memory must not be used again.
#pragma once
#include <chrono>
#include <deque>
#include <map>
#include <span>

#include "verbs.hpp"

namespace kv {

struct Piece { uint64_t from, to, bytes; };
static_assert(sizeof(Piece) == 24);

class Loopback {
 public:
  static constexpr uint32_t SIGNAL_EVERY = 64, DEPTH = 1024, MARKS = 256;   // MARKS: copies under way

  // `device`: a name, or "auto". verbs::Fault E145, E146, E148, E149.
  explicit Loopback(const std::string& device, const verbs::Route& route = {});
  ~Loopback();
  Loopback(const Loopback&) = delete;

  // Registers memory that stays until remove(); what it is called in copy(). `address` of a GPU works where nvidia-peermem is loaded. E147, E148.
  uint32_t add(uint64_t address, uint64_t bytes, bool writable);
  // The same of a part of a dma-buf. E148 where library, kernel or device cannot.
  uint32_t add_dma_buf(const verbs::DmaBuf& part);
  void remove(uint32_t region);   // out_of_range for one that is not there; what was copying must have settled

  // Gives pieces to the device, in order; waits for room in its queue, `seconds` at most. The number to wait for; 0: the time was over
  // (some pieces may be under way). out_of_range where a piece does not lie within its region; E148 where the device failed before, or
  // sends no piece as long as one of them.
  uint64_t copy(uint32_t from, uint32_t to, std::span<const Piece> pieces, double seconds);
  // Whether all up to `number` is in place. E148 where the device failed.
  bool wait(uint64_t number, double seconds);
  // Nothing of what was posted so far is read or written any more when this is true; what is not done in time is cut off, with what others
  // wait for. False: the device refuses to.
  bool settle(double seconds);

  const std::string& device_name() const { return device_->name; }
  int gid_index() const { return device_->gid_index; }
  int64_t registered_bytes() const { return device_->registered_bytes.load(); }

 private:
  struct Region {
    uint64_t address, bytes;
    bool writable;
    std::unique_ptr<verbs::Region> memory;
  };
  void connect();
  void take_completions();
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  template <class Done> bool wait_locked(Lock& lock, Clock::time_point end, Done done);
  void post_locked(ibv_send_wr* chain, size_t count);
  bool mark_locked(Lock& lock, Clock::time_point end);
  uint32_t keep(Region region);
  void check_broken() const;

  std::mutex mutex_;
  std::shared_ptr<verbs::Device> device_;
  std::unique_ptr<verbs::Endpoint> near_, far_;
  std::map<uint32_t, Region> regions_;
  uint32_t next_region_ = 1;
  uint64_t posted_ = 0, sent_ = 0, arrived_ = 0, generation_ = 0;
  std::deque<uint64_t> marks_;
  std::string broken_;      // why; empty: it works
  bool lost_ = false;       // the device did not even reset
};

}  // namespace kv
