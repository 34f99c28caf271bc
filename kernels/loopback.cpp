// Loopback: see loopback.hpp. The module's face is at the end.
#include "loopback.hpp"

#include <nanobind/stl/string.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>

#include "verbs_bind.hpp"

namespace kv {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr double SLICE_SECONDS = 0.02;   // another thread may have taken the completion that this one waits for
constexpr double SECONDS_MAX = 3600;
constexpr int GENERATION_SHIFT = 40;   // of a number to wait for: 10^12 pieces of one pair of queues

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, SECONDS_MAX)));
}
double left(Clock::time_point end) { return std::chrono::duration<double>(end - Clock::now()).count(); }
}  // namespace

Loopback::Loopback(const std::string& device) : device_(verbs::Device::open(device)) { connect(); }

void Loopback::connect() {
  near_ = std::make_unique<verbs::Endpoint>(device_, verbs::Depths{DEPTH, 1}, 0);
  far_ = std::make_unique<verbs::Endpoint>(device_, verbs::Depths{1, 1}, IBV_ACCESS_REMOTE_WRITE);
  std::string why;
  if (!near_->connect(far_->address(), why) || !far_->connect(near_->address(), why))
    throw verbs::Fault("E148", device_->name + " to itself", why, "give its interface an address, or use another mover");
  posted_ = completed_ = 0;
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

uint32_t Loopback::add_dma_buf(int fd, uint64_t bytes, uint64_t address) {
  return keep(Region{address, bytes, true, verbs::Region::of_dma_buf(device_, fd, bytes, address, ACCESS)});
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

uint64_t Loopback::copy(uint32_t from, uint32_t to, std::span<const Piece> pieces, double seconds) {
  const auto end = after(seconds);
  std::unique_lock lock(mutex_);
  if (!broken_.empty() && !lost_ && near_->reset() && far_->reset()) connect();
  check_broken();
  const Region &source = regions_.at(from), &target = regions_.at(to);   // a map's nodes stay where they are
  for (const Piece& p : pieces)
    if (p.bytes > source.bytes || p.from < source.address || p.from - source.address > source.bytes - p.bytes || p.bytes > target.bytes ||
        p.to < target.address || p.to - target.address > target.bytes - p.bytes || p.bytes > device_->message_bytes_max || p.bytes == 0 ||
        !target.writable)
      throw std::out_of_range("a piece does not lie within what was registered");
  const uint64_t depth = near_->depths.sends;
  for (size_t at = 0; at < pieces.size();) {
    if (posted_ - completed_ >= depth && !wait_locked(lock, posted_ - depth + 1, left(end))) return 0;
    check_broken();   // another thread may have found out meanwhile
    const size_t count = std::min({pieces.size() - at, size_t(depth - (posted_ - completed_)), size_t(SIGNAL_EVERY)});
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
    if (!near_->post_send(wr)) {
      posted_ += count;   // some may have been taken: only a reset tells that they are over
      broken_ = "work requests are refused";
      check_broken();
    }
    posted_ += count;
    at += count;
  }
  return generation_ << GENERATION_SHIFT | posted_;
}

void Loopback::take_completions() {
  ibv_wc done[64];
  if (!near_->listen()) broken_ = "its completion queue is broken";
  for (int n; (n = near_->poll(done, 64)) != 0;) {
    if (n < 0) {
      broken_ = "its completion queue is broken";
      return;
    }
    for (int i = 0; i < n; i++) {
      if (done[i].status == IBV_WC_SUCCESS) completed_ = std::max(completed_, done[i].wr_id);
      else if (broken_.empty()) broken_ = "a write failed with status " + std::to_string(done[i].status);
    }
  }
}

bool Loopback::wait_locked(std::unique_lock<std::mutex>& lock, uint64_t number, double seconds) {
  const auto end = after(seconds);
  const uint64_t generation = generation_;
  for (;;) {
    if (generation != generation_) throw verbs::Fault("E148", device_->name + " to itself", "it was cut off by a failure", "see dmesg; use another mover");
    if (completed_ >= number) return true;
    if (broken_.empty()) take_completions();
    if (completed_ >= number) return true;
    check_broken();
    const double rest = left(end);
    if (rest <= 0) return false;
    pollfd waiting{near_->fd(), POLLIN, 0};
    lock.unlock();
    ::poll(&waiting, 1, std::max(1, int(std::min(rest, SLICE_SECONDS) * 1000)));
    lock.lock();
  }
}

bool Loopback::wait(uint64_t number, double seconds) {
  std::unique_lock lock(mutex_);
  const uint64_t generation = number >> GENERATION_SHIFT;
  if (generation != generation_) throw verbs::Fault("E148", device_->name + " to itself", "it was cut off by a failure", "see dmesg; use another mover");
  return wait_locked(lock, number & ((uint64_t(1) << GENERATION_SHIFT) - 1), seconds);
}

bool Loopback::settle(double seconds) {
  std::unique_lock lock(mutex_);
  const uint64_t generation = generation_;
  try {
    if (broken_.empty() && wait_locked(lock, posted_, seconds)) return true;
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
      .def("__init__", [](Loopback* self, const std::string& device) { freely([&] { new (self) Loopback(device); }); }, "device"_a = "auto")
      .def("add", [](Loopback& l, uint64_t address, uint64_t bytes, bool writable) { return freely([&] { return l.add(address, bytes, writable); }); },
           "address"_a, "size_bytes"_a, "writable"_a)
      .def("add_dma_buf", [](Loopback& l, int fd, uint64_t bytes, uint64_t address) { return freely([&] { return l.add_dma_buf(fd, bytes, address); }); },
           "descriptor"_a, "size_bytes"_a, "address"_a)
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
      .def_prop_ro("registered_bytes", [](const Loopback& l) { return l.registered_bytes(); });
}
