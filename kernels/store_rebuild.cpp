// After an unclean stop: freeing what nobody owns, and making a lost index again from the segments.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

#include "store_impl.hpp"

namespace kv {

// Frees every byte of a segment that no entry owns; then writes its footer.
void StoreImpl::clean_segment(const std::shared_ptr<Segment>& segment, std::vector<std::pair<uint32_t, uint32_t>> owned, bool seal) {
  if (segment->hold() < 0) return;
  segment->offsets_4k.clear();
  for (const auto& [offset_4k, blocks] : owned) segment->offsets_4k.push_back(offset_4k);
  {
    // Deleted just now, perhaps still being read: these have their own way out.
    std::lock_guard lock(limbo_mutex_);
    for (const Freed& f : limbo_)
      if (f.segment == segment->id) owned.emplace_back(f.offset_4k, f.blocks_4k);
  }
  std::sort(owned.begin(), owned.end());
  struct stat st{};
  fstat(segment->fd(), &st);
  const uint64_t size = align_up(uint64_t(st.st_size), RECORD_ALIGN);
  uint64_t end = 0;
  const auto free_gap = [&](uint64_t from, uint64_t to) {
    SegmentFiles::data_runs(segment->fd(), from, to, [&](uint64_t a, uint64_t b) {
      if (SegmentFiles::punch(segment->fd(), a, b - a) == 0) counters_.orphan_bytes += b - a;
      else counters_.punch_errors++;
    });
  };
  for (const auto& [offset_4k, blocks] : owned) {
    const uint64_t at = uint64_t(offset_4k) * RECORD_ALIGN;
    if (at > end) free_gap(end, at);
    end = std::max(end, at + uint64_t(blocks) * RECORD_ALIGN);
  }
  if (seal) {
    if (size > end && ftruncate(segment->fd(), off_t(end)) == 0) counters_.orphan_bytes += size - end;
    segment->append_at = end;
    segment->end_known = true;
    if (segments_.seal(segment) != Status::OK) counters_.io_errors++;
  } else if (segment->append_at > end) {
    free_gap(end, segment->append_at);
  }
  segment->unhold();
}

bool StoreImpl::rebuild_segments() {
  for (const auto& segment : segments_.all()) {
    if (segment->id >= first_new_id_) continue;
    do {   // a put that began under the index before this one ends first
      std::unique_lock lock(stop_mutex_);
      if (stopping_ || index_bad_) return false;
      if (!segments_.has_writers(*segment)) break;
      stop_cv_.wait_for(lock, std::chrono::milliseconds(1));
    } while (true);
    if (!rebuild_one(segment)) return false;
  }
  if (!with_index([&](Index& index) { index.sync(); })) return false;
  unlink(marker().c_str());
  return true;
}

bool StoreImpl::rebuild_one(const std::shared_ptr<Segment>& segment) {
  if (segment->hold() < 0) return true;   // unreadable: its records are misses
  Ranges owned;
  bool sound = true;
  FooterView footer;
  const int fd = segment->fd();
  std::vector<uint8_t> page(RECORD_ALIGN);
  if (read_footer(fd, segment->id, footer)) {
    segment->append_at = footer.data_end;
    counters_.unknown_versions += footer.unknown;
    Heads heads;
    // Punched since the footer was written? A hole says so, and where holes are not shown (or were filled by a copy) the first page does.
    // All first pages are asked for before the first is read: one at a time would take minutes a TB.
    std::erase_if(footer.entries, [&](const auto& entry) {
      const uint64_t offset = uint64_t(entry.first) * RECORD_ALIGN, bytes = RecordView{entry.second.data()}.head().record_bytes;
      const off_t hole = segments_.holes_visible() ? lseek(fd, off_t(offset), SEEK_HOLE) : off_t(offset + bytes);
      return hole < 0 || uint64_t(hole) < offset + bytes;
    });
    for (const auto& [offset_4k, head] : footer.entries)
      posix_fadvise(fd, off_t(offset_4k) * RECORD_ALIGN, RECORD_ALIGN, POSIX_FADV_WILLNEED);
    for (auto& [offset_4k, head] : footer.entries)
      if (SegmentFiles::read_all(fd, page.data(), head.size(), uint64_t(offset_4k) * RECORD_ALIGN) &&
          std::memcmp(page.data(), head.data(), head.size()) == 0)
        heads.emplace_back(offset_4k, std::move(head));
    sound = recover_entries(segment, heads, owned);
    segment->sealed = true;
    if (sound) clean_segment(segment, std::move(owned[segment->id]), false);
  } else {
    // No footer: look at every 4 KiB step, and believe only records whose every sum is right.
    struct stat st{};
    fstat(fd, &st);
    const uint64_t size = uint64_t(st.st_size);
    std::vector<uint64_t> words;
    uint64_t next = 0;
    SegmentFiles::data_runs(fd, 0, size, [&](uint64_t from, uint64_t to) {
      for (uint64_t at = std::max(next, from / RECORD_ALIGN * RECORD_ALIGN); at < to && at + RECORD_ALIGN <= size;) {
        next = at + RECORD_ALIGN;
        Status head = Status::IO_ERROR;
        if (SegmentFiles::read_all(fd, page.data(), page.size(), at)) head = check_head(page.data(), page.size());
        counters_.unknown_versions += head == Status::BAD_VERSION;
        if (head == Status::OK) {
          const RecordHead& h = RecordView{page.data()}.head();
          if (at + h.record_bytes <= size) {
            words.resize(h.record_bytes / 8 + 1);
            auto* bytes = reinterpret_cast<uint8_t*>(words.data());
            if (SegmentFiles::read_all(fd, bytes, h.record_bytes, at) && check_record(bytes, h.record_bytes) == Status::OK) {
              const Heads one{{uint32_t(at / RECORD_ALIGN), {page.begin(), page.begin() + h.head_bytes}}};
              sound = sound && recover_entries(segment, one, owned);
              next = at + align_up(h.record_bytes, RECORD_ALIGN);
            } else {
              counters_.recovery_dropped++;
            }
          }
        }
        at = next;
      }
    });
    if (sound) clean_segment(segment, std::move(owned[segment->id]), true);
  }
  segment->unhold();
  return sound;
}

bool StoreImpl::recover_entries(const std::shared_ptr<Segment>& segment, const Heads& heads, Ranges& owned) {
  constexpr size_t BATCH = 1024;   // about 10 ms under the mutex; a segment of full extents has 400
  for (size_t at = 0; at < heads.size(); at += BATCH) {
    std::deque<PutOp> ops;
    std::vector<size_t> from;
    for (size_t i = at; i < std::min(heads.size(), at + BATCH); i++) {
      const RecordView view{heads[i].second.data()};
      const RecordHead& h = view.head();
      PutOp& op = ops.emplace_back();
      op.key = entry_key_of(view);
      if (config_.virtual_clock) clamp_bucket(h.bucket);
      // What has a bucket of the future stays as if just used, no longer.
      const uint32_t bucket = config_.virtual_clock ? h.bucket : std::min(h.bucket, bucket_now() + 1);
      op.recency = recency_key(op.key.data(), h.retention_class, bucket, h.start_block);
      op.value = encode_entry(op.key, view, segment->id, uint64_t(heads[i].first) * RECORD_ALIGN, bucket);
      op.segment = segment;
      from.push_back(i);
    }
    std::vector<PutOp*> batch;
    for (PutOp& op : ops) batch.push_back(&op);
    std::sort(batch.begin(), batch.end(), [](const PutOp* a, const PutOp* b) { return a->key < b->key; });
    const bool looked = with_index([&](Index& index) {
      std::lock_guard commit(commit_mutex_);
      commit_batch(batch);
      Index::Reader reader(index);
      for (PutOp& op : ops) {
        if (op.status != Status::EXISTS) continue;
        MDB_val key = val(op.key), value;   // this very place, if the put that wrote it ended after the index was replaced
        Entry here, there;
        if (mdb_get(reader.txn, index.extents, &key, &value) != 0 || !decode_entry(key, value, here)) continue;
        if (decode_entry(val(op.key), val(op.value), there) && here.fixed.segment == there.fixed.segment &&
            here.fixed.offset_4k == there.fixed.offset_4k)
          op.status = Status::OK;
      }
    });
    if (!looked) return false;
    for (size_t i = 0; i < ops.size(); i++) {
      if (ops[i].status != Status::OK) {
        counters_.recovery_dropped++;   // another record of the same shard came first, or there is no room
        continue;
      }
      counters_.recovered++;
      const uint64_t bytes = RecordView{heads[from[i]].second.data()}.head().record_bytes;
      owned[segment->id].emplace_back(heads[from[i]].first, uint32_t(align_up(bytes, RECORD_ALIGN) / RECORD_ALIGN));
    }
  }
  return true;
}

}  // namespace kv
