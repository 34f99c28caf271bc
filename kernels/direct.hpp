// A landing zone in memory of others, a GPU's too: nodes write whole bodies there, nothing is copied or checked here. docs/GPU.md, path B.
//
//   DirectZone   registered once, in a protection domain of its own
//   DirectLink   a queue pair of that domain, joined to one node's: it may write anywhere in the zone, so what came is checked after the fence
//   ReadBack     a queue pair of that domain that peers may not use, joined to another of this host's: the device reads a byte of the zone
//
// Fence: a link's queue pair is reset; once ibv_modify_qp has returned no packet is taken for it any more. No other queue pair that a peer
// may write through is in the domain, so when all links of a zone are fenced nobody writes to it, though its key stays (a dma-buf takes no
// memory windows). A zone with a link that could not be fenced is lost. Any thread for the zone, one at a time for a link.
//
// Then read_back(), for a zone in a GPU: what the device sent it before the fence may still be on its way over PCIe, whose reads do not pass
// writes. So when a byte has come from there, the writes are there. It goes the way of loopback writes, out of the zone: a byte to host RAM.
#pragma once
#include "verbs.hpp"

namespace kv {

class DirectLink;

class ReadBack {
 public:
  ReadBack(std::shared_ptr<verbs::Device> device, ibv_pd* pd);     // E148
  // The device has read the byte at `address` of a region in that domain. False: not in time, or the queue pair is at its end; `why`.
  bool run(uint64_t address, uint32_t lkey, double seconds, std::string& why);

 private:
  Pages memory_{1, Pages::Use::PINNED};
  verbs::Region region_;
  verbs::Endpoint far_, near_;
};

class DirectZone : public std::enable_shared_from_this<DirectZone> {
 public:
  // `device`: a name, or "auto". verbs::Fault E145, E146, E148, E149.
  static std::shared_ptr<DirectZone> open(const std::string& device, const verbs::Route& route);
  ~DirectZone();
  DirectZone(const DirectZone&) = delete;

  // Once: the memory. A GPU's address works where nvidia-peermem is loaded. E147, E148.
  void add(uint64_t address, uint64_t bytes);
  void add_dma_buf(const verbs::DmaBuf& part);
  // For `credits` items at once. E148; out_of_range where the part does not lie in the zone.
  std::unique_ptr<DirectLink> link(uint64_t address, uint64_t bytes, uint32_t credits);
  // See above. E148: it did not come, and the zone is lost.
  void read_back(double seconds);
  bool close();        // false: links are left, or the device refuses

  const std::shared_ptr<verbs::Device> device;
  std::atomic<int64_t> links{0};
  std::atomic<bool> lost{false};   // by a link that could not be fenced, or bytes that could not be read back

 private:
  friend class DirectLink;
  explicit DirectZone(std::shared_ptr<verbs::Device> d) : device(std::move(d)) {}
  void check_lost() const;
  ibv_pd* pd_ = nullptr;
  std::unique_ptr<verbs::Region> region_;
  std::mutex mutex_;
  std::unique_ptr<ReadBack> read_back_;   // made when first needed
  uint64_t address_ = 0, bytes_ = 0;
};

class DirectLink {
 public:
  DirectLink(std::shared_ptr<DirectZone> zone, uint64_t address, uint64_t bytes, uint32_t credits);
  ~DirectLink();       // fences
  DirectLink(const DirectLink&) = delete;

  wire::VerbsOpen address() const;               // what VERBS_OPEN says
  void connect(const wire::VerbsOpen& peer);     // E148
  // Immediates that have come, waiting `seconds` for the first; those taken are posted again. E148: the queue pair is at its end.
  std::vector<uint32_t> take(double seconds);
  bool fence();        // idempotent; the queue pair is gone after it

 private:
  verbs::Endpoint& endpoint() const;             // E148 where it is fenced
  const std::shared_ptr<DirectZone> zone_;
  const uint64_t at_, bytes_;
  std::unique_ptr<verbs::Endpoint> endpoint_;
  uint32_t credits_ = 0;
  bool fenced_ = false, fence_fine_ = false;
};

}  // namespace kv
