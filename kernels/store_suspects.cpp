// Shards that may be bad: what readers say, and what is next in a scrub, is looked at here, a record at a time. Only the disk is believed.
#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "priority.hpp"
#include "store_impl.hpp"

namespace kv {

namespace {

constexpr uint64_t LOOK_BYTES_PER_SECOND = 8 << 20;   // a flood of reports costs a disk of 500 MB/s a sixtieth
constexpr uint64_t LOOK_BYTES_MIN = 64 << 10;         // what a look counts as: seeks and lookups are not free
constexpr size_t DAMAGES_MAX = 16;                    // told one by one; past it they are only counted

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

}  // namespace

void StoreImpl::suspect(const Owner& owner, const wire::SuspectShard* shards, uint32_t count, uint32_t* statuses) {
  std::fill_n(statuses, count, uint32_t(Status::BUSY));
  with_index([&](Index& index) {
    Index::Reader reader(index);
    for (uint32_t i = 0; i < count; i++) {
      const EntryKey name = entry_key(owner, shards[i].extent_key, shards[i].write_id, shards[i].shard);
      MDB_val key = val(name), value;
      const int rc = mdb_get(reader.txn, index.extents, &key, &value);
      if (rc && rc != MDB_NOTFOUND) throw IndexFault("suspect", rc);
      statuses[i] = uint32_t(rc ? Status::NOT_FOUND : suspects_.add(name, boottime_ms()) ? Status::OK : Status::BUSY);
    }
  });
  counters_.suspects_absent += uint64_t(std::count(statuses, statuses + count, uint32_t(Status::NOT_FOUND)));
  counters_.suspects_refused += uint64_t(std::count(statuses, statuses + count, uint32_t(Status::BUSY)));
}

void StoreImpl::run_suspects() {
  give_way_to_loads();
  EntryKey name;
  while (suspects_.take(name, boottime_ms)) {
    uint64_t bytes = 0;
    try {
      switch (look_at(name, true, bytes)) {
        case Looked::SOUND: counters_.suspects_unfounded++; break;
        case Looked::DAMAGED: counters_.suspects_damaged++; break;
        case Looked::ABSENT: counters_.suspects_absent++; break;
      }
    } catch (const std::bad_alloc&) {
      counters_.suspects_refused++;
    }
    if (!pause(uint32_t(std::max(bytes, LOOK_BYTES_MIN) * 1000 / LOOK_BYTES_PER_SECOND))) return;
  }
}

// Reads the record from the disk, checks all of it, drops it if it is bad. `forget`: what the page cache has of it may be bad as well. Waits
// for the disk: not for a loop's thread.
StoreImpl::Looked StoreImpl::look_at(const EntryKey& name, bool forget, uint64_t& bytes) {
  wire::ReadExtent extent{};
  std::memcpy(extent.extent_key, name.data() + OWNER_BYTES, KEY_BYTES);
  std::memcpy(&extent.write_id, name.data() + GROUP_BYTES, 8);
  extent.shard = name[NAME_BYTES];
  ReadRef ref;
  if (open_read(owner_of_entry(name.data()), extent, ref) != Status::OK) return Looked::ABSENT;
  bytes = ref.record_bytes;
  const uint64_t padded = align_up(bytes, RECORD_ALIGN);
  const std::unique_ptr<uint8_t, Free> record(static_cast<uint8_t*>(std::aligned_alloc(RECORD_ALIGN, padded)));
  if (!record) throw std::bad_alloc();
  bool read = false;
  const auto sound = [&](int fd) {
    read = fd >= 0 && SegmentFiles::read_all(fd, record.get(), padded, ref.offset);
    return read && check_record(record.get(), bytes) == Status::OK && entry_key_of(RecordView{record.get()}) == name;
  };
  const auto drop_pages = [&] { posix_fadvise(ref.fd(), off_t(ref.offset), off_t(padded), POSIX_FADV_DONTNEED); };
  if (forget) drop_pages();
  if (sound(ref.fd_direct())) return Looked::SOUND;   // no pages of others have to go for it
  drop_pages();   // bad only if it is bad twice: a filesystem without direct reads must cost no record
  const bool fine = sound(ref.fd());
  drop_pages();
  if (fine) return Looked::SOUND;
  if (drop_corrupt(name)) {
    std::lock_guard lock(damages_mutex_);
    if (damages_.size() < DAMAGES_MAX) damages_.push_back({uint32_t(ref.segment_id()), ref.offset, bytes, name[NAME_BYTES], read});
    damages_count_++;
  }
  return Looked::DAMAGED;
}

void StoreImpl::report_corrupt(const Owner& owner, const uint8_t* extent_key, uint64_t write_id, uint8_t shard) {
  counters_.corrupt_reported++;
  uint64_t bytes = 0;
  look_at(entry_key(owner, extent_key, write_id, shard), true, bytes);
}

Scrubbed StoreImpl::scrub(const std::vector<uint8_t>& after, uint64_t bytes_max) {
  constexpr uint32_t ROWS_MAX = 1024;
  Scrubbed out;
  std::vector<EntryKey> names;
  bool more = false;
  const bool looked = with_index([&](Index& index) {
    Index::Reader reader(index);
    std::vector<uint8_t> from = after;
    from.push_back(0);   // the least key behind it
    MDB_val key = val(from), value;
    uint64_t bytes = 0;
    int rc = mdb_cursor_get(reader.extents, &key, &value, MDB_SET_RANGE);
    for (; rc == 0; rc = mdb_cursor_get(reader.extents, &key, &value, MDB_NEXT)) {
      EntryFixed front;
      if (!decode_front(key, value, front)) throw IndexFault("value", MDB_CORRUPTED);
      if ((more = !names.empty() && (bytes + front.record_bytes > bytes_max || names.size() == ROWS_MAX))) return;
      bytes += front.record_bytes;
      std::memcpy(names.emplace_back().data(), key.mv_data, ENTRY_KEY_BYTES);
    }
    if (rc != MDB_NOTFOUND) throw IndexFault("scrub", rc);
  });
  if (!looked) return {after, 0, 0};
  for (const EntryKey& name : names) {
    uint64_t bytes = 0;
    out.damaged += look_at(name, false, bytes) == Looked::DAMAGED;
    out.bytes += bytes;
  }
  if (more) out.after.assign(names.back().begin(), names.back().end());
  counters_.scrubbed_bytes += out.bytes;
  return out;
}

std::pair<std::vector<Damage>, uint64_t> StoreImpl::take_damages() {
  std::lock_guard lock(damages_mutex_);
  return {std::exchange(damages_, {}), std::exchange(damages_count_, 0)};
}

}  // namespace kv
