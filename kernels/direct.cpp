// DirectZone: see direct.hpp. The module's face is at the end.
#include "direct.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <arpa/inet.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>

#include "verbs_bind.hpp"
#include "verbs_library.hpp"

namespace kv {

namespace {
constexpr int ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr double SECONDS_MAX = 3600;
}  // namespace

std::shared_ptr<DirectZone> DirectZone::open(const std::string& name, const verbs::Route& route) {
  std::shared_ptr<DirectZone> zone(new DirectZone(verbs::Device::open(name, route)));
  zone->pd_ = verbs::library().alloc_pd(zone->device->context);
  if (!zone->pd_) throw verbs::Fault("E148", zone->device->name + ": protection domain", std::generic_category().message(errno), "load through host memory");
  return zone;
}

DirectZone::~DirectZone() { close(); }

void DirectZone::add(uint64_t address, uint64_t bytes) {
  if (region_) throw std::logic_error("a zone has one memory");
  region_ = std::make_unique<verbs::Region>(device, reinterpret_cast<void*>(address), bytes, ACCESS, pd_);
  address_ = address;
  bytes_ = bytes;
}

void DirectZone::add_dma_buf(const verbs::DmaBuf& part) {
  if (region_) throw std::logic_error("a zone has one memory");
  region_ = verbs::Region::of_dma_buf(device, part, ACCESS, pd_);
  address_ = part.address;
  bytes_ = part.bytes;
}

void DirectZone::check_lost() const {
  if (lost) throw verbs::Fault("E148", device->name, "writes to this memory could not be fenced", "register other memory, and never use this again");
}

std::unique_ptr<DirectLink> DirectZone::link(uint64_t address, uint64_t bytes, uint32_t credits) {
  if (!region_ || bytes == 0 || bytes > wire::VERBS_ZONE_BYTES_MAX || bytes > bytes_ || address < address_ || address - address_ > bytes_ - bytes)
    throw std::out_of_range("not a part of what was registered, or too large");
  check_lost();
  return std::make_unique<DirectLink>(shared_from_this(), address, bytes, credits);
}

void DirectZone::read_back(double seconds) {
  std::lock_guard lock(mutex_);
  if (!region_) throw std::logic_error("a zone without memory");
  check_lost();
  if (!read_back_) read_back_ = std::make_unique<ReadBack>(device, pd_);
  std::string why;
  if (read_back_->run(address_, region_->lkey(), seconds, why)) return;
  lost = true;
  throw verbs::Fault("E148", device->name + ": reading back from a landing zone", why, "never use this memory again; look at dmesg");
}

bool DirectZone::close() {
  if (links) return false;
  read_back_.reset();
  if (region_ && !region_->close()) return false;
  region_.reset();
  if (pd_ && verbs::library().dealloc_pd(pd_)) return false;
  pd_ = nullptr;
  return true;
}

ReadBack::ReadBack(std::shared_ptr<verbs::Device> device, ibv_pd* pd)
    : region_(device, memory_.data(), 1, ACCESS), far_(device, verbs::Depths{1, 1}, IBV_ACCESS_REMOTE_WRITE), near_(device, verbs::Depths{1, 1}, 0, pd) {
  std::string why;
  if (!near_.connect(far_.address(), why) || !far_.connect(near_.address(), why))
    throw verbs::Fault("E148", device->name + " to itself", why, "give its interface an address, or load through host memory");
}

bool ReadBack::run(uint64_t address, uint32_t lkey, double seconds, std::string& why) {
  ibv_sge from{address, 1, lkey};
  ibv_send_wr wr{};
  wr.sg_list = &from;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(memory_.data());
  wr.wr.rdma.rkey = region_.rkey();
  if (!near_.post_send(&wr)) return why = "the work request is refused", false;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, SECONDS_MAX)));
  for (;;) {
    ibv_wc done;
    const int n = near_.listen() ? near_.poll(&done, 1) : -1;
    if (n < 0) return why = "the completion queue is broken", false;
    if (n && done.status == IBV_WC_SUCCESS) return true;   // its byte was fetched before it could be acknowledged
    if (n) return why = "it failed with status " + std::to_string(done.status), false;
    const double rest = std::chrono::duration<double>(end - Clock::now()).count();
    if (rest <= 0) return why = "it took too long", false;
    pollfd waiting{near_.fd(), POLLIN, 0};
    ::poll(&waiting, 1, int(rest * 1000) + 1);
  }
}

DirectLink::DirectLink(std::shared_ptr<DirectZone> zone, uint64_t address, uint64_t bytes, uint32_t credits)
    : zone_(std::move(zone)), at_(address), bytes_(bytes) {
  endpoint_ = std::make_unique<verbs::Endpoint>(zone_->device, verbs::Depths{1, credits}, IBV_ACCESS_REMOTE_WRITE, zone_->pd_);
  credits_ = endpoint_->depths.receives;
  zone_->links++;
}

DirectLink::~DirectLink() {
  if (fence()) return;
  endpoint_.reset();
  zone_->links--;
}

verbs::Endpoint& DirectLink::endpoint() const {
  if (!endpoint_ || fenced_) throw verbs::Fault("E148", zone_->device->name, "the link is fenced", "open another");
  return *endpoint_;
}

wire::VerbsOpen DirectLink::address() const {
  wire::VerbsOpen out = endpoint().address();
  out.credits = credits_;
  out.zone_addr = at_;
  out.zone_bytes = bytes_;
  out.rkey = zone_->region_->rkey();
  return out;
}

void DirectLink::connect(const wire::VerbsOpen& peer) {
  std::string why;
  if (!verbs::valid_peer(peer, false)) why = "the node's address is none";
  else if (!endpoint().post_receives(credits_)) why = "receive requests are refused";
  else if (endpoint().connect(peer, why)) return;
  throw verbs::Fault("E148", zone_->device->name, why, "load through host memory");
}

std::vector<uint32_t> DirectLink::take(double seconds) {
  std::vector<uint32_t> found;
  auto broken = [this](const std::string& why) { return verbs::Fault("E148", zone_->device->name, why, "load through host memory"); };
  verbs::Endpoint& end = endpoint();
  for (int turn = 0; turn < 2; turn++) {
    if (!end.listen()) throw broken("the completion queue is broken");
    ibv_wc done[64];
    for (int n; (n = end.poll(done, 64)) != 0;) {
      if (n < 0) throw broken("the completion queue is broken");
      for (int i = 0; i < n; i++) {
        if (done[i].status != IBV_WC_SUCCESS || done[i].opcode != IBV_WC_RECV_RDMA_WITH_IMM)
          throw broken("the queue pair failed with status " + std::to_string(done[i].status));
        found.push_back(ntohl(done[i].imm_data));
      }
      if (!end.post_receives(uint32_t(n))) throw broken("receive requests are refused");
    }
    if (!found.empty() || turn) break;
    pollfd waiting{end.fd(), POLLIN, 0};
    ::poll(&waiting, 1, int(std::clamp(seconds, 0.0, SECONDS_MAX) * 1000));
  }
  return found;
}

bool DirectLink::fence() {
  if (fenced_) return fence_fine_;
  fenced_ = true;
  fence_fine_ = endpoint_->reset();
  if (!fence_fine_) return zone_->lost = true, false;
  endpoint_.reset();
  zone_->links--;
  return true;
}

}  // namespace kv

void bind_direct(nanobind::module_& m) {
  using namespace kv;
  nb::class_<DirectLink>(m, "DirectLink")
      .def("address",
           [](const DirectLink& l) {
             const wire::VerbsOpen mine = l.address();
             return nb::bytes(&mine, sizeof mine);
           })
      .def("connect",
           [](DirectLink& l, nb::bytes peer) {
             wire::VerbsOpen there;
             if (peer.size() != sizeof there) throw std::out_of_range("not the body of a VERBS_OPEN");
             std::memcpy(&there, peer.data(), sizeof there);
             freely([&] { l.connect(there); });
           },
           "peer"_a)
      .def("take", [](DirectLink& l, double seconds) { return freely([&] { return l.take(seconds); }); }, "seconds"_a)
      .def("fence", [](DirectLink& l) { return freely([&] { return l.fence(); }); });
  nb::class_<DirectZone>(m, "DirectZone")
      .def(nb::new_([](const std::string& device, uint8_t traffic_class, int gid_index) {
             return freely([&] { return DirectZone::open(device, {traffic_class, gid_index}); });
           }),
           "device"_a = "auto", "traffic_class"_a = 0, "gid_index"_a = verbs::ANY_GID)
      .def("add", [](DirectZone& z, uint64_t address, uint64_t bytes) { freely([&] { z.add(address, bytes); }); }, "address"_a, "size_bytes"_a)
      .def("add_dma_buf",
           [](DirectZone& z, int fd, uint64_t offset, uint64_t bytes, uint64_t address) {
             freely([&] { z.add_dma_buf({fd, offset, bytes, address}); });
           },
           "descriptor"_a, "offset_bytes"_a, "size_bytes"_a, "address"_a)
      .def("link",
           [](DirectZone& z, uint64_t address, uint64_t bytes, uint32_t credits) { return freely([&] { return z.link(address, bytes, credits); }); },
           "address"_a, "size_bytes"_a, "credits"_a)
      .def("read_back", [](DirectZone& z, double seconds) { freely([&] { z.read_back(seconds); }); }, "seconds"_a)
      .def("close", [](DirectZone& z) { return freely([&] { return z.close(); }); })
      .def_prop_ro("device_name", [](const DirectZone& z) { return z.device->name; })
      .def_prop_ro("registered_bytes", [](const DirectZone& z) { return z.device->registered_bytes.load(); })
      .def_prop_ro("queue_pairs", [](const DirectZone& z) { return z.device->queue_pairs.load(); });
}
