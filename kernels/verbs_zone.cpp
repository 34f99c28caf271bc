// Landing zones: registered memory that one queue pair may write to. See verbs.hpp.
#include <algorithm>
#include <cerrno>

#include "verbs.hpp"
#include "verbs_library.hpp"

namespace kv::verbs {

namespace {
constexpr uint64_t SLAB_BYTES_MAX = 32 << 20, SLAB_ZONES_MAX = 8;
}

ZonePool::ZonePool(std::shared_ptr<Device> d, uint64_t bytes, uint64_t bytes_max, bool by_window)
    : device(std::move(d)),
      zone_bytes(std::min(align_up(std::max<uint64_t>(bytes, 64 << 10), 64 << 10), wire::VERBS_ZONE_BYTES_MAX)),
      windows(by_window && device->windows),
      zones_max_(std::max<uint64_t>(bytes_max / zone_bytes, 1)) {}

void ZonePool::prepare() {
  std::lock_guard lock(mutex_);
  if (zones_) return;
  grow_locked();
  if (!windows) Region(device, slabs_[0].memory->data(), zones_ * zone_bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
}

void ZonePool::grow_locked() {
  const uint64_t zones = std::min(std::clamp<uint64_t>(SLAB_BYTES_MAX / zone_bytes, 1, SLAB_ZONES_MAX), zones_max_ - zones_);
  Slab slab;
  slab.memory = std::make_unique<Pages>(zones * zone_bytes, Pages::Use::PINNED);
  // Without windows each zone is registered by itself, in a protection domain of its connection's (Landing::create).
  if (windows) slab.region = std::make_unique<Region>(device, slab.memory->data(), zones * zone_bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  for (uint64_t i = zones; i-- > 0;) free_.push_back({slab.memory->data() + i * zone_bytes, slab.region.get()});
  zones_ += zones;
  slabs_.push_back(std::move(slab));
}

bool ZonePool::take(Zone& zone) {
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    if (zones_ >= zones_max_) return false;
    grow_locked();
  }
  zone = free_.back();
  free_.pop_back();
  return true;
}

void ZonePool::give(const Zone& zone) {
  std::lock_guard lock(mutex_);
  free_.push_back(zone);
}

std::unique_ptr<Landing> Landing::create(std::shared_ptr<ZonePool> pool, uint32_t credits) {
  std::unique_ptr<Landing> out(new Landing(std::move(pool)));
  const std::shared_ptr<Device> device = out->pool_->device;
  auto refused = [&device](const char* what) { return Fault("E148", device->name + ": " + what, std::generic_category().message(errno), "fewer connections, or use TCP"); };
  if (!out->pool_->take(out->zone_)) return nullptr;
  if (!out->pool_->windows) {
    out->pd_ = library().alloc_pd(device->context);
    if (!out->pd_) throw refused("protection domain");
    out->region_ = std::make_unique<Region>(device, out->zone_.at, out->pool_->zone_bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, out->pd_);
    out->rkey_ = out->region_->rkey();
  }
  out->endpoint_ = std::make_unique<Endpoint>(device, Depths{4, credits}, IBV_ACCESS_REMOTE_WRITE, out->pd_);
  out->credits_ = out->endpoint_->depths.receives;
  if (out->pool_->windows) {
    out->window_ = ibv_alloc_mw(device->pd, IBV_MW_TYPE_2);
    if (!out->window_) throw refused("memory window");
    out->rkey_ = ibv_inc_rkey(out->window_->rkey);
  }
  return out;
}

wire::VerbsOpen Landing::address() const {
  wire::VerbsOpen out = endpoint_->address();
  out.credits = credits_;
  out.zone_addr = reinterpret_cast<uint64_t>(zone_.at);
  out.zone_bytes = pool_->zone_bytes;
  out.rkey = rkey_;
  return out;
}

bool Landing::connect(const wire::VerbsOpen& peer, std::string& why) {
  if (!endpoint_->post_receives(credits_)) return why = "receive requests are refused", false;   // before anything can come
  if (!endpoint_->connect(peer, why)) return false;
  if (!window_) return true;
  ibv_send_wr wr{};
  wr.wr_id = BIND;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw.mw = window_;
  wr.bind_mw.rkey = rkey_;
  wr.bind_mw.bind_info.mr = zone_.region->mr();
  wr.bind_mw.bind_info.addr = reinterpret_cast<uint64_t>(zone_.at);
  wr.bind_mw.bind_info.length = pool_->zone_bytes;
  wr.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE;
  if (!endpoint_->post_send(&wr)) return why = "the window cannot be bound", false;
  return true;
}

Landing::~Landing() {
  bool fenced = true;
  if (endpoint_) fenced &= endpoint_->reset();
  if (window_) fenced &= ibv_dealloc_mw(window_) == 0;   // before its queue pair: some devices count the window among the pair's users
  if (region_) fenced &= region_->close();
  endpoint_.reset();
  if (pd_) library().dealloc_pd(pd_);
  if (!zone_.at) return;
  if (fenced) pool_->give(zone_);
  else pool_->device->lost_bytes += int64_t(pool_->zone_bytes);
}

}  // namespace kv::verbs
