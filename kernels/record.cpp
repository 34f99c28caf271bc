// Checks of a record: every length is compared with its limit before it is used, so any bytes may be given.
#include "record.hpp"

namespace kv {

static_assert(sizeof(RecordHead) + 8 * PLANES_MAX + 4 * EARLIER_MAX + 8 + 8 * BLOCKS_PER_EXTENT_MAX <= RECORD_ALIGN,
              "a head always fits into the record's first 4 KiB page");

namespace {

bool all_zero(const uint8_t* p, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (p[i]) return false;
  return true;
}

// Ranges of single fields and of the plane table; the head's sum is right, so these are the writer's own words.
bool fields_valid(const RecordView& view) {
  const RecordHead& h = view.head();
  if (h.k < 1 || h.k > K_MAX || h.m > M_MAX || h.shard >= h.k + h.m) return false;
  if (h.retention_class >= CLASSES_MAX || h.fidelity > uint8_t(Fidelity::DECODE)) return false;
  if (h.flags || !all_zero(h.zero1, sizeof h.zero1) || !all_zero(h.reserved, sizeof h.reserved)) return false;
  if (h.block_bytes < 1 || h.block_bytes > BLOCK_BYTES_MAX) return false;
  if (h.block_count > 1 && uint64_t(h.block_count) * h.block_bytes > EXTENT_BYTES_MAX) return false;
  uint64_t block_bytes = 0, record_bytes = h.head_bytes + checks_bytes_of(h.plane_count, h.block_count);
  for (uint32_t p = 0; p < h.plane_count; p++) {
    const PlaneEntry& plane = view.planes()[p];
    if (plane.plane_bytes < 1 || plane.plane_bytes > BLOCK_BYTES_MAX) return false;
    if (plane.shard_bytes != shard_bytes_of(plane.plane_bytes, h.k)) return false;
    block_bytes += plane.plane_bytes;
    record_bytes += uint64_t(plane.shard_bytes) * h.block_count;
  }
  if (block_bytes != h.block_bytes || record_bytes != h.record_bytes || record_bytes > RECORD_BYTES_MAX) return false;
  return view.tags()[0] == block_tag(h.extent_key);
}

}  // namespace

Status check_head(const uint8_t* base, uint64_t available) {
  if (available < sizeof(RecordHead)) return Status::BAD_REQUEST;
  const RecordView view{base};
  const RecordHead& h = view.head();
  if (h.magic != RECORD_MAGIC) return Status::BAD_REQUEST;
  if (h.version != RECORD_VERSION) return Status::BAD_VERSION;
  if (h.plane_count < 1 || h.block_count < 1 || h.block_count > BLOCKS_PER_EXTENT_MAX || h.earlier_count > EARLIER_MAX)
    return Status::BAD_REQUEST;
  if (h.head_bytes != head_bytes_of(h.plane_count, h.earlier_count, h.block_count) || h.head_bytes > available)
    return Status::BAD_REQUEST;
  if (h.head_sum != head_sum_of(base, h.head_bytes)) return Status::CORRUPT;
  return fields_valid(view) ? Status::OK : Status::BAD_REQUEST;
}

Status check_record(const uint8_t* base, uint64_t bytes) {
  if (const Status status = check_head(base, bytes); status != Status::OK) return status;
  const RecordView view{base};
  const RecordHead& h = view.head();
  if (h.record_bytes > bytes) return Status::BAD_REQUEST;
  if (XXH3_64bits(base + h.head_bytes, checks_bytes_of(h.plane_count, h.block_count)) != h.checks_sum) return Status::CORRUPT;
  ShardIdentity id{};
  std::memcpy(id.owner, h.owner, OWNER_BYTES);
  std::memcpy(id.extent_key, h.extent_key, KEY_BYTES);
  id.write_id = h.write_id;
  id.shard = h.shard;
  const uint8_t* piece = base + view.plane_offset(0);
  for (id.plane = 0; id.plane < h.plane_count; id.plane++) {
    const uint32_t shard_bytes = view.planes()[id.plane].shard_bytes;
    const uint64_t* sums = view.sums(id.plane);
    for (id.block = 0; id.block < h.block_count; id.block++, piece += shard_bytes)
      if (shard_sum(piece, shard_bytes, shard_seed(id)) != sums[id.block]) return Status::CORRUPT;
  }
  return Status::OK;
}

}  // namespace kv
