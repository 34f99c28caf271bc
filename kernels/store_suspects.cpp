// Shards that may be bad: what readers say is looked at here, one record at a time, and only the disk is believed.
#include <fcntl.h>

#include <algorithm>

#include "priority.hpp"
#include "store_impl.hpp"

namespace kv {

namespace {

constexpr uint64_t LOOK_BYTES_PER_SECOND = 8 << 20;   // a flood of reports costs a disk of 500 MB/s a sixtieth
constexpr uint64_t LOOK_BYTES_MIN = 64 << 10;         // what a look counts as: seeks and lookups are not free
constexpr size_t DAMAGES_MAX = 16;                    // told one by one; past it they are only counted

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
      switch (look_at(name, bytes)) {
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

// Reads the record from the disk, checks all of it, drops it if it is bad. Waits for the disk: not for a loop's thread.
StoreImpl::Looked StoreImpl::look_at(const EntryKey& name, uint64_t& bytes) {
  wire::ReadExtent extent{};
  std::memcpy(extent.extent_key, name.data() + OWNER_BYTES, KEY_BYTES);
  std::memcpy(&extent.write_id, name.data() + GROUP_BYTES, 8);
  extent.shard = name[NAME_BYTES];
  ReadRef ref;
  if (open_read(owner_of_entry(name.data()), extent, ref) != Status::OK) return Looked::ABSENT;
  bytes = ref.record_bytes;
  posix_fadvise(ref.fd(), off_t(ref.offset), off_t(align_up(bytes, RECORD_ALIGN)), POSIX_FADV_DONTNEED);   // what RAM has of it says nothing about the disk
  std::vector<uint64_t> words(bytes / 8 + 1);
  auto* record = reinterpret_cast<uint8_t*>(words.data());
  const bool read = SegmentFiles::read_all(ref.fd(), record, bytes, ref.offset);
  if (read && check_record(record, bytes) == Status::OK && entry_key_of(RecordView{record}) == name) return Looked::SOUND;
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
  look_at(entry_key(owner, extent_key, write_id, shard), bytes);
}

std::pair<std::vector<Damage>, uint64_t> StoreImpl::take_damages() {
  std::lock_guard lock(damages_mutex_);
  return {std::exchange(damages_, {}), std::exchange(damages_count_, 0)};
}

}  // namespace kv
