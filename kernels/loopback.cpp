// Loopback: see loopback.hpp. The module's face is at the end.
#include "loopback.hpp"

#include <arpa/inet.h>
#include <nanobind/stl/string.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "verbs_bind.hpp"

namespace kv {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr double SLICE_SECONDS = 0.02;   // another thread may have taken the completion that this one waits for
constexpr double SECONDS_MAX = 3600;
constexpr int GENERATION_SHIFT = 40;   // of a number to wait for: 10^12 pieces of one pair of queues
constexpr const char* BROKEN_QUEUE = "its completion queue is broken";

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, SECONDS_MAX)));
}
}  // namespace

Loopback::Loopback(const std::string& device, const verbs::Route& route) : device_(verbs::Device::open(device, route)) { connect(); }

void Loopback::connect() {
  near_ = std::make_unique<verbs::Endpoint>(device_, verbs::Depths{DEPTH, 1}, 0);
  far_ = std::make_unique<verbs::Endpoint>(device_, verbs::Depths{1, MARKS}, IBV_ACCESS_REMOTE_WRITE);
  std::string why = "receive requests are refused";
  if (!far_->post_receives(far_->depths.receives) || !near_->connect(far_->address(), why) || !far_->connect(near_->address(), why))
    throw verbs::Fault("E148", device_->name + " to itself", why, "give its interface an address, or use another mover");
  posted_ = sent_ = arrived_ = 0;
  marks_.clear();
  generation_++;
  broken_.clear();
}

Loopback::~Loopback() {
  settle(0);
  near_.reset();
  far_.reset();
}

uint32_t Loopback::keep(Region region) {
  std::lock_guard lock(mutex_);
  regions_.emplace(next_region_, std::move(region));
  return next_region_++;
}

uint32_t Loopback::add(uint64_t address, uint64_t bytes, bool writable) {
  auto memory = std::make_unique<verbs::Region>(device_, reinterpret_cast<void*>(address), bytes, writable ? ACCESS : 0);
  return keep(Region{address, bytes, writable, std::move(memory)});
}

uint32_t Loopback::add_dma_buf(const verbs::DmaBuf& part) {
  return keep(Region{part.address, part.bytes, true, verbs::Region::of_dma_buf(device_, part, ACCESS)});
}

void Loopback::remove(uint32_t region) {
  std::lock_guard lock(mutex_);
  Region& found = regions_.at(region);
  if (!found.memory->close()) throw verbs::Fault("E148", device_->name, "keeps memory registered");
  regions_.erase(region);
}

void Loopback::check_broken() const {
  if (!broken_.empty()) throw verbs::Fault("E148", device_->name + " to itself", broken_, "see dmesg; use another mover");
}

void Loopback::post_locked(ibv_send_wr* chain, size_t count) {
  check_broken();       // found out while there was waited for room
  posted_ += count;   // where they are refused some may have been taken: only a reset tells that they are over
  if (near_->post_send(chain)) return;
  broken_ = "work requests are refused";
  check_broken();
}

// Behind all that was posted so far. False: there was no room in time.
bool Loopback::mark_locked(Lock& lock, Clock::time_point end) {
  if (!wait_locked(lock, end, [this] { return posted_ - sent_ < near_->depths.sends && marks_.size() < far_->depths.receives; })) return false;
  ibv_send_wr wr{};
  wr.wr_id = posted_ + 1;
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.imm_data = htonl(uint32_t(posted_ + 1));
  post_locked(&wr, 1);
  marks_.push_back(posted_);
  return true;
}

uint64_t Loopback::copy(uint32_t from, uint32_t to, std::span<const Piece> pieces, double seconds) {
  const auto end = after(seconds);
  Lock lock(mutex_);
  if (!broken_.empty() && !lost_ && near_->reset() && far_->reset()) connect();
  check_broken();
  const Region &source = regions_.at(from), &target = regions_.at(to);   // a map's nodes stay where they are
  for (const Piece& p : pieces) {
    if (p.bytes > source.bytes || p.from < source.address || p.from - source.address > source.bytes - p.bytes || p.bytes > target.bytes ||
        p.to < target.address || p.to - target.address > target.bytes - p.bytes || p.bytes == 0 || !target.writable)
      throw std::out_of_range("a piece does not lie within what was registered");
    if (p.bytes > device_->message_bytes_max)
      throw verbs::Fault("E148", device_->name + " to itself", "it sends at most " + std::to_string(device_->message_bytes_max) + " bytes in one piece",
                         "give narrower layers, or use another mover");
  }
  for (size_t at = 0; at < pieces.size();) {
    if (!wait_locked(lock, end, [this] { return posted_ - sent_ < near_->depths.sends; })) return 0;
    const size_t count = std::min({pieces.size() - at, size_t(near_->depths.sends - (posted_ - sent_)), size_t(SIGNAL_EVERY)});
    ibv_send_wr wr[SIGNAL_EVERY];
    ibv_sge sge[SIGNAL_EVERY];
    for (size_t i = 0; i < count; i++) {
      const Piece& p = pieces[at + i];
      sge[i] = {p.from, uint32_t(p.bytes), source.memory->lkey()};
      wr[i] = {};
      wr[i].wr_id = posted_ + i + 1;
      wr[i].next = i + 1 < count ? &wr[i + 1] : nullptr;
      wr[i].sg_list = &sge[i];
      wr[i].num_sge = 1;
      wr[i].opcode = IBV_WR_RDMA_WRITE;
      wr[i].send_flags = i + 1 == count ? unsigned(IBV_SEND_SIGNALED) : 0u;   // of each chain the last, so one in SIGNAL_EVERY at least
      wr[i].wr.rdma.remote_addr = p.to;
      wr[i].wr.rdma.rkey = target.memory->rkey();
    }
    post_locked(wr, count);
    at += count;
  }
  return mark_locked(lock, end) ? generation_ << GENERATION_SHIFT | marks_.back() : 0;
}

void Loopback::take_completions() {
  ibv_wc done[64];
  if (!near_->listen() || !far_->listen()) broken_ = BROKEN_QUEUE;
  for (int n; (n = near_->poll(done, 64)) != 0;) {
    if (n < 0) return void(broken_ = BROKEN_QUEUE);
    for (int i = 0; i < n; i++) {
      if (done[i].status == IBV_WC_SUCCESS) sent_ = std::max(sent_, done[i].wr_id);
      else if (broken_.empty()) broken_ = "a write failed with status " + std::to_string(done[i].status);
    }
  }
  for (int n; (n = far_->poll(done, 64)) != 0;) {
    if (n < 0) return void(broken_ = BROKEN_QUEUE);
    for (int i = 0; i < n; i++) {
      const bool fine = done[i].status == IBV_WC_SUCCESS && done[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM && !marks_.empty() &&
                        ntohl(done[i].imm_data) == uint32_t(marks_.front());
      if (fine) {
        arrived_ = marks_.front();
        marks_.pop_front();
      } else if (broken_.empty()) {
        broken_ = "a mark failed with status " + std::to_string(done[i].status);
      }
    }
    if (broken_.empty() && !far_->post_receives(uint32_t(n))) broken_ = "receive requests are refused";
  }
}

// Until done(), or false at `end`. Others may post and wait meanwhile.
template <class Done>
bool Loopback::wait_locked(Lock& lock, Clock::time_point end, Done done) {
  const uint64_t generation = generation_;
  for (;;) {
    if (generation != generation_) throw verbs::Fault("E148", device_->name + " to itself", "it was cut off by a failure", "see dmesg; use another mover");
    if (broken_.empty()) take_completions();
    if (done()) return true;
    check_broken();
    const double rest = std::chrono::duration<double>(end - Clock::now()).count();
    if (rest <= 0) return false;
    pollfd waiting[] = {{near_->fd(), POLLIN, 0}, {far_->fd(), POLLIN, 0}};
    lock.unlock();
    ::poll(waiting, 2, std::max(1, int(std::min(rest, SLICE_SECONDS) * 1000)));
    lock.lock();
  }
}

bool Loopback::wait(uint64_t number, double seconds) {
  Lock lock(mutex_);
  const uint64_t generation = number >> GENERATION_SHIFT;
  if (generation != generation_) throw verbs::Fault("E148", device_->name + " to itself", "it was cut off by a failure", "see dmesg; use another mover");
  number &= (uint64_t(1) << GENERATION_SHIFT) - 1;
  return arrived_ >= number || wait_locked(lock, after(seconds), [this, number] { return arrived_ >= number; });
}

bool Loopback::settle(double seconds) {
  const auto end = after(seconds);
  Lock lock(mutex_);
  const uint64_t generation = generation_;
  try {
    if (broken_.empty()) {
      const bool marked = posted_ == (marks_.empty() ? arrived_ : marks_.back());   // else a copy() ended before its mark
      if (marked || mark_locked(lock, end)) {
        const uint64_t last = posted_;
        if (arrived_ >= last || wait_locked(lock, end, [this, last] { return arrived_ >= last; })) return true;
      }
    }
  } catch (const verbs::Fault&) {
    if (generation != generation_) return !lost_;   // what was posted then was cut off by a reset
  }
  if (broken_.empty()) broken_ = "it was cut off";
  // Both ends, whatever the first says: the one sends no more, the other takes no more.
  const bool sends = near_->reset(), takes = far_->reset();
  lost_ = lost_ || !sends || !takes;
  return !lost_;
}

namespace {
using Pieces = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
}  // namespace

}  // namespace kv

void bind_loopback(nanobind::module_& m) {
  using namespace kv;
  nb::class_<Loopback>(m, "Loopback")
      .def("__init__", [](Loopback* self, const std::string& device, int gid) { freely([&] { new (self) Loopback(device, {.gid_index = gid}); }); },
           "device"_a = "auto", "gid_index"_a = verbs::ANY_GID)
      .def("add", [](Loopback& l, uint64_t address, uint64_t bytes, bool writable) { return freely([&] { return l.add(address, bytes, writable); }); },
           "address"_a, "size_bytes"_a, "writable"_a)
      .def("add_dma_buf",
           [](Loopback& l, int fd, uint64_t offset, uint64_t bytes, uint64_t address) {
             return freely([&] { return l.add_dma_buf({fd, offset, bytes, address}); });
           },
           "descriptor"_a, "offset_bytes"_a, "size_bytes"_a, "address"_a)
      .def("remove", [](Loopback& l, uint32_t region) { freely([&] { l.remove(region); }); }, "region"_a)
      .def("copy",
           [](Loopback& l, uint32_t from, uint32_t to, Pieces pieces, double seconds) {
             const std::span list(reinterpret_cast<const Piece*>(pieces.data()), pieces.shape(0));
             return freely([&] { return l.copy(from, to, list, seconds); });
           },
           "source"_a, "target"_a, "pieces"_a.noconvert(), "seconds"_a)
      .def("wait", [](Loopback& l, uint64_t number, double seconds) { return freely([&] { return l.wait(number, seconds); }); }, "number"_a,
           "seconds"_a)
      .def("settle", [](Loopback& l, double seconds) { return freely([&] { return l.settle(seconds); }); }, "seconds"_a)
      .def_prop_ro("device_name", [](const Loopback& l) { return l.device_name(); })
      .def_prop_ro("gid_index", [](const Loopback& l) { return l.gid_index(); })
      .def_prop_ro("registered_bytes", [](const Loopback& l) { return l.registered_bytes(); });
}
