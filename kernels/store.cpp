// The hot verbs of the store.
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>

#include "store_impl.hpp"

namespace kv {

namespace {

constexpr uint32_t PIN_SECONDS_MAX = 600;
constexpr double MAP_SHARE_MAX = 0.85;   // of the index's map: copy on write needs free pages to delete, too
constexpr int64_t FREEING_BYTES_MAX = 256 << 20;
constexpr uint32_t WITHDRAWALS_PER_COMMIT = 64;
// Looked at between keys: eight writings of one key take 8.7 kB at most.
constexpr size_t REPLY_BYTES_MAX = wire::SMALL_BODY_MAX - 16384;

// Ends a window in which a lookup may hand out a place; deletions wait until the windows of their time are over.
class Window {
 public:
  Window(std::atomic<uint64_t>& epoch, std::array<std::atomic<uint64_t>, 2>& in) {
    for (;;) {
      const uint64_t now = epoch.load();
      slot_ = &in[now & 1];
      slot_->fetch_add(1);
      if (epoch.load() == now) return;
      slot_->fetch_sub(1);
    }
  }
  ~Window() { slot_->fetch_sub(1); }

 private:
  std::atomic<uint64_t>* slot_;
};

}  // namespace

std::unique_ptr<Store> Store::open(const StoreConfig& config) { return std::make_unique<StoreImpl>(config); }

ReadRef::ReadRef(ReadRef&& other) noexcept { *this = std::move(other); }

ReadRef& ReadRef::operator=(ReadRef&& other) noexcept {
  if (this == &other) return *this;
  if (segment_) segment_->end_read(uint32_t(offset / RECORD_ALIGN));
  segment_ = std::move(other.segment_);
  other.segment_.reset();
  offset = other.offset, record_bytes = other.record_bytes, head_bytes = other.head_bytes, block_count = other.block_count;
  shard_bytes = std::move(other.shard_bytes);
  return *this;
}

ReadRef::~ReadRef() {
  if (segment_) segment_->end_read(uint32_t(offset / RECORD_ALIGN));
}

int ReadRef::fd() const { return segment_->fd(); }
int ReadRef::fd_direct() const { return segment_->fd_direct(); }
uint64_t ReadRef::segment_id() const { return segment_->id; }

uint32_t StoreImpl::bucket_now() const {
  if (config_.virtual_clock) return virtual_bucket_;
  return uint32_t(uint64_t(time(nullptr)) / config_.bucket_seconds);
}

uint32_t StoreImpl::day_now() const { return uint32_t(uint64_t(bucket_now()) * config_.bucket_seconds / 86400); }

uint32_t StoreImpl::clamp_bucket(uint32_t bucket) {
  if (config_.virtual_clock) {
    uint32_t seen = virtual_bucket_;
    while (bucket > seen && !virtual_bucket_.compare_exchange_weak(seen, bucket)) {
    }
    return bucket;
  }
  const uint32_t now = bucket_now();
  return std::clamp(bucket, now ? now - 1 : 0, now + 1);
}

void StoreImpl::discover(const Owner& owner, const uint8_t* keys, uint32_t count, std::vector<uint8_t>& out) {
  const size_t begin = out.size();
  wire::DiscoverReply reply{0, 0};
  out.resize(begin + sizeof reply);
  counters_.discover_keys += count;

  // Filter first, in strides: the probes of a stride are in flight together.
  std::vector<uint32_t> candidates;
  {
    std::shared_lock lock(filter_mutex_);
    if (filter_) {
      constexpr uint32_t STRIDE = 32;
      uint64_t hashes[STRIDE];
      for (uint32_t at = 0; at < count; at += STRIDE) {
        const uint32_t n = std::min(STRIDE, count - at);
        for (uint32_t i = 0; i < n; i++) {
          hashes[i] = CuckooFilter::hash(group_key(owner, keys + size_t(at + i) * KEY_BYTES).data());
          filter_->prefetch(hashes[i]);
        }
        for (uint32_t i = 0; i < n; i++)
          if (filter_->maybe(hashes[i])) candidates.push_back(at + i);
      }
    } else {
      candidates.resize(count);
      std::iota(candidates.begin(), candidates.end(), 0u);
    }
  }
  counters_.discover_filtered += count - candidates.size();

  const bool looked = candidates.empty() || with_index([&](Index& index) {
    Index::Reader reader(index);
    for (const uint32_t ordinal : candidates) {
      if (out.size() - begin > REPLY_BYTES_MAX) {
        reply.busy = 1;
        return;
      }
      const GroupKey group = group_key(owner, keys + size_t(ordinal) * KEY_BYTES);
      MDB_val key = val(group), value;
      int rc = mdb_cursor_get(reader.extents, &key, &value, MDB_SET_RANGE);
      size_t writing_at = 0;   // of the last writing appended for this key
      for (; rc == 0 && has_prefix(key, group.data(), GROUP_BYTES); rc = mdb_cursor_get(reader.extents, &key, &value, MDB_NEXT)) {
        Entry entry;
        if (!decode_entry(key, value, entry)) throw IndexFault("value", MDB_CORRUPTED);
        const EntryFixed& f = entry.fixed;
        const auto* name = static_cast<const uint8_t*>(key.mv_data);
        uint64_t write_id;
        std::memcpy(&write_id, name + GROUP_BYTES, 8);
        const uint64_t bit = 1ull << (name[NAME_BYTES] & 63);
        if (writing_at) {
          wire::Writing last;
          std::memcpy(&last, &out[writing_at], sizeof last);
          if (last.write_id == write_id) {
            last.shard_mask |= bit;
            std::memcpy(&out[writing_at], &last, sizeof last);
            continue;
          }
        }
        wire::Writing w{};
        w.write_id = write_id;
        w.shard_mask = bit;
        w.write_epoch = f.write_epoch;
        w.key_ordinal = ordinal;
        w.start_block = f.start_block;
        w.block_count = f.block_count;
        w.earlier_count = f.earlier_count;
        w.fidelity = f.fidelity;
        w.retention_class = f.retention_class;
        w.depth = f.depth;
        w.kv_group = f.kv_group;
        w.pg = f.pg;
        w.block_bytes = f.block_bytes;
        w.k = f.k, w.m = f.m, w.cipher = f.cipher, w.plane_count = f.plane_count;
        w.layout_tag = f.layout_tag;
        uint32_t earlier[EARLIER_MAX];
        if (!entry.earlier(earlier)) throw IndexFault("value", MDB_CORRUPTED);
        writing_at = out.size();
        const size_t earlier_bytes = align_up(4ull * f.earlier_count, 8), tags_bytes = 8ull * f.block_count;
        out.resize(writing_at + sizeof w + earlier_bytes + tags_bytes);
        std::memcpy(&out[writing_at], &w, sizeof w);
        std::memcpy(&out[writing_at + sizeof w], earlier, 4ull * f.earlier_count);
        std::memcpy(&out[writing_at + sizeof w + earlier_bytes], entry.tags, tags_bytes);
        reply.writings++;
      }
      if (rc && rc != MDB_NOTFOUND) throw IndexFault("discover", rc);
    }
  });
  if (!looked) {
    reply = {0, 1};
    out.resize(begin + sizeof reply);
  }
  counters_.discover_writings += reply.writings;
  std::memcpy(&out[begin], &reply, sizeof reply);
}

// Mask of the shards held of one writing; `first` is the entry of its lowest shard.
uint64_t StoreImpl::lookup_writing(Index::Reader& reader, const NameKey& name, EntryFixed& first) {
  uint64_t mask = 0;
  MDB_val key = val(name), value;
  int rc = mdb_cursor_get(reader.extents, &key, &value, MDB_SET_RANGE);
  for (; rc == 0 && has_prefix(key, name.data(), NAME_BYTES); rc = mdb_cursor_get(reader.extents, &key, &value, MDB_NEXT)) {
    // The check is not computed: it would read ten lines of memory more for each name of each promise. Who reads the shard computes it.
    EntryFixed front;
    if (!decode_front(key, value, front)) throw IndexFault("value", MDB_CORRUPTED);
    if (!mask) first = front;
    mask |= 1ull << (static_cast<const uint8_t*>(key.mv_data)[NAME_BYTES] & 63);
  }
  if (rc && rc != MDB_NOTFOUND) throw IndexFault("lookup", rc);
  return mask;
}

void StoreImpl::promise(const wire::PromiseRequest& request, const wire::WritingName* names, wire::PromiseAnswer* answers) {
  Owner owner;
  std::memcpy(owner.data(), request.owner, OWNER_BYTES);
  const bool pin = request.flags & wire::PROMISE_PIN, touch = request.flags & wire::PROMISE_TOUCH;
  const uint32_t bucket = touch ? clamp_bucket(request.bucket) : 0;
  const uint32_t now = now_seconds(), until = now + std::min<uint32_t>(request.pin_seconds, PIN_SECONDS_MAX);
  std::vector<uint32_t> order(request.count);
  std::iota(order.begin(), order.end(), 0u);
  // In key order, neighbours in the index are looked up one after another.
  const auto before = [&](uint32_t a, uint32_t b) { return std::memcmp(names[a].extent_key, names[b].extent_key, KEY_BYTES) < 0; };
  std::sort(order.begin(), order.end(), before);
  uint64_t held = 0, busy = 0;
  const bool looked = with_index([&](Index& index) {
    const uint64_t deletes = deletes_.load(), changes = pins_.changes();
    Index::Reader reader(index);
    for (const uint32_t i : order) {
      const NameKey name = name_key(owner, names[i].extent_key, names[i].write_id);
      Pins::Known known = pin ? pins_.renew(name, now, until) : Pins::Known{};
      const bool renewed = known.shard_mask;
      if (!renewed) {
        EntryFixed first{};
        known = {lookup_writing(reader, name, first), first.bucket, first.retention_class};
      }
      answers[i] = {uint32_t(known.shard_mask ? Status::OK : Status::NOT_FOUND), known.shard_mask ? known.bucket : 0, known.shard_mask};
      if (!known.shard_mask) continue;
      if (pin && !renewed) {
        const Pins::Pinned pinned = pins_.pin(name, now, until);
        if (pinned == Pins::Pinned::DYING) {
          answers[i] = {uint32_t(Status::NOT_FOUND), 0, 0};
          continue;
        }
        if (pinned == Pins::Pinned::FULL) answers[i].status = uint32_t(Status::BUSY), busy++;
        pins_.remember(name, known, changes);
      }
      held++;
      if (touch) {
        const uint8_t retention = request.retention_class < CLASSES_MAX ? request.retention_class : known.retention_class;
        if (bucket <= known.bucket && !longer(retention, known.retention_class)) continue;
        if (!touches_.add(name, {bucket, retention}, [this](uint8_t a, uint8_t b) { return longer(a, b); }))
          counters_.touches_dropped++;
        else if (pin)
          pins_.touched(name, std::max(bucket, known.bucket), longer(retention, known.retention_class) ? retention : known.retention_class);
      }
    }
    if (!pin || deletes_.load() == deletes) return;
    // Something was deleted between the snapshot and the pins: what is pinned now stays, so one more look is final.
    reader.refresh();
    for (const uint32_t i : order) {
      if (!answers[i].shard_mask) continue;
      EntryFixed first{};
      answers[i].shard_mask = lookup_writing(reader, name_key(owner, names[i].extent_key, names[i].write_id), first);
      if (!answers[i].shard_mask) answers[i] = {uint32_t(Status::NOT_FOUND), 0, 0};
    }
  });
  if (!looked)
    for (uint32_t i = 0; i < request.count; i++) answers[i] = {uint32_t(Status::BUSY), 0, 0};
  counters_.promises += request.count;
  counters_.promises_held += held;
  counters_.promises_busy += busy;
}

void StoreImpl::withdraw(const Owner& owner, const wire::WritingName* names, uint32_t count, uint32_t* statuses) {
  for (uint32_t at = 0; at < count; at += WITHDRAWALS_PER_COMMIT) {
    std::vector<Prefix> prefixes;
    std::vector<uint32_t> ordinals, removed;
    for (uint32_t i = at; i < std::min(count, at + WITHDRAWALS_PER_COMMIT); i++) {
      const EntryKey from = entry_key(owner, names[i].extent_key, names[i].write_id, 0);
      statuses[i] = uint32_t(Status::BUSY);
      // The tombstone first: a shard of this writing that is being stored right now must not come after it.
      if (!tombstones_.add(name_of_entry(from), now_seconds())) continue;
      prefixes.push_back({from, NAME_BYTES});
      ordinals.push_back(i);
    }
    bool room = true;
    if (!with_index([&](Index&) { room = remove_all(prefixes, GhostReason::WITHDRAWN, removed); })) continue;
    for (size_t n = 0; n < ordinals.size(); n++) {
      statuses[ordinals[n]] = uint32_t(!room ? Status::NO_SPACE : removed[n] ? Status::OK : Status::NOT_FOUND);
      counters_.withdrawn += room ? removed[n] : 0;
    }
  }
}

Status StoreImpl::open_read(const Owner& owner, const wire::ReadExtent& extent, ReadRef& out) {
  counters_.reads++;
  const EntryKey name = entry_key(owner, extent.extent_key, extent.write_id, extent.shard);
  Status status = Status::BUSY;
  bool file_gone = false;
  const Window window(epoch_, in_epoch_);
  with_index([&](Index& index) {
    Index::Reader reader(index);
    MDB_val key = val(name), value;
    const int rc = mdb_get(reader.txn, index.extents, &key, &value);
    if (rc && rc != MDB_NOTFOUND) throw IndexFault("read", rc);
    status = Status::NOT_FOUND;
    if (rc) return;
    Entry entry;
    ReadRef ref;
    if (!decode_entry(key, value, entry) || !entry.shard_bytes(ref.shard_bytes)) throw IndexFault("value", MDB_CORRUPTED);
    const EntryFixed& f = entry.fixed;
    if (uint32_t(extent.first_block) + extent.block_count > f.block_count) return void(status = Status::BAD_REQUEST);
    if (f.segment == SEGMENT_SYNTHETIC) return;
    const std::shared_ptr<Segment> segment = segments_.find(f.segment);
    const int held = segment ? segment->hold() : -ENOENT;
    if (held < 0) {
      file_gone = held == -ENOENT;
      status = file_gone ? Status::NOT_FOUND : Status::IO_ERROR;
      return;
    }
    segment->begin_read(f.offset_4k);
    ref.offset = uint64_t(f.offset_4k) * RECORD_ALIGN;
    ref.record_bytes = f.record_bytes;
    ref.head_bytes = entry.head_bytes();
    ref.block_count = f.block_count;
    ref.segment_ = segment;
    out = std::move(ref);
    status = Status::OK;
  });
  if (status == Status::NOT_FOUND) counters_.reads_absent++;
  if (status == Status::IO_ERROR) counters_.io_errors++;
  if (file_gone) drop_corrupt(name);
  return status;
}

Status StoreImpl::room_for(uint64_t padded_bytes) {
  const int64_t need = int64_t(padded_bytes);
  if (config_.capacity_bytes) {
    const int64_t capacity = int64_t(config_.capacity_bytes);
    if (used_bytes_ + writing_bytes_ + need > capacity) return Status::NO_SPACE;
    // What is deleted keeps its bytes for a second or two until it is punched: allowed for a while, or paced freeing would stop writes.
    if (freeing_bytes_ > capacity / 8 + FREEING_BYTES_MAX) return Status::NO_SPACE;
  }
  if (disk_free_ - need < int64_t(config_.disk_reserve_bytes)) return Status::NO_SPACE;
  if (map_share_ > MAP_SHARE_MAX) return Status::NO_SPACE;
  return Status::OK;
}

void StoreImpl::poke_pressure(uint64_t wanted_bytes) {
  {
    std::lock_guard lock(pressure_mutex_);
    wanted_bytes_ += wanted_bytes;
  }
  pressure_cv_.notify_all();
}

Status Store::put(uint8_t* record, uint64_t bytes) {
  Status status = Status::INTERNAL;
  Puts one;
  if (auto put = write(record, bytes, status)) one.push_back(std::move(put));
  if (one.empty()) return status;
  commit(one);
  return one[0]->status;
}

std::unique_ptr<Put> StoreImpl::write(uint8_t* record, uint64_t bytes, Status& status) {
  if (status = check_record(record, bytes); status != Status::OK) {
    (status == Status::BAD_VERSION ? counters_.unknown_versions : counters_.puts_corrupt)++;
    return nullptr;
  }
  const RecordView view{record};
  const RecordHead& h = view.head();
  if (status = bytes == h.record_bytes ? Status::OK : Status::BAD_REQUEST; status != Status::OK) return nullptr;
  const EntryKey name = entry_key_of(view);
  if (status = tombstones_.has(name_of_entry(name), now_seconds()) ? Status::TOMBSTONED : Status::OK; status != Status::OK) return nullptr;
  const bool looked = with_index([&](Index& index) {
    Index::Reader reader(index);
    MDB_val key = val(name), value;
    const int rc = mdb_get(reader.txn, index.extents, &key, &value);
    if (rc && rc != MDB_NOTFOUND) throw IndexFault("put", rc);
    if (rc == 0) status = Status::EXISTS;
  });
  if (!looked) status = Status::BUSY;
  if (status == Status::EXISTS) counters_.puts_existing++;
  if (status != Status::OK) return nullptr;
  const uint64_t padded = align_up(bytes, RECORD_ALIGN);
  if (status = room_for(padded); status != Status::OK) {
    counters_.puts_no_space++;
    poke_pressure(padded);
    return nullptr;
  }
  auto op = std::make_unique<PutOp>(*this, bytes);
  op->key = name;
  status = op->status = segments_.reserve(padded, h.head_bytes, op->segment, op->offset);
  if (status != Status::OK) return nullptr;
  std::memset(record + bytes, 0, padded - bytes);
  const int64_t began = now_ns();
  const bool written = SegmentFiles::write_all(op->segment->fd(), record, padded, op->offset);
  const int why = errno;
  write_seconds.observe(now_ns() - began);
  if (!written) {
    status = op->status = why == ENOSPC || why == EDQUOT ? Status::NO_SPACE : Status::IO_ERROR;
    return nullptr;
  }
  op->status = Status::INTERNAL;   // of one that is never committed
  op->segment->dirty = true;
  const uint32_t bucket = clamp_bucket(h.bucket);
  bool reused = false;
  {
    std::lock_guard lock(chances_mutex_);
    reused = second_chance_ && chances_.has(CuckooFilter::hash(op->key.data()));
  }
  op->recency = recency_key(op->key.data(), queue_of(h.retention_class, reused), bucket, h.start_block);
  op->value = encode_entry(op->key, view, op->segment->id, op->offset, bucket, reused);
  return op;
}

}  // namespace kv
