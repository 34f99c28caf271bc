#include "index.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace kv {

namespace {

constexpr unsigned READERS_MAX = 510;
constexpr size_t POOL_MAX = 64;
constexpr char STOP_KEY[4] = {'s', 't', 'o', 'p'};

void put_varint(std::vector<uint8_t>& out, uint64_t v) {
  while (v >= 0x80) out.push_back(uint8_t(v) | 0x80), v >>= 7;
  out.push_back(uint8_t(v));
}

bool get_varint(const uint8_t*& p, const uint8_t* end, uint64_t& out) {
  out = 0;
  for (int shift = 0; shift < 42; shift += 7) {
    if (p == end) return false;
    out |= uint64_t(*p & 0x7f) << shift;
    if (!(*p++ & 0x80)) return true;
  }
  return false;
}

uint32_t check_of(const void* key, size_t key_bytes, const void* rest, size_t rest_bytes) {
  XXH3_state_t s;
  XXH3_64bits_reset(&s);
  XXH3_64bits_update(&s, key, key_bytes);
  XXH3_64bits_update(&s, rest, rest_bytes);
  return uint32_t(XXH3_64bits_digest(&s));
}

void seal_value(const EntryKey& key, std::vector<uint8_t>& value) {
  const uint32_t check = check_of(key.data(), key.size(), value.data() + 4, value.size() - 4);
  std::memcpy(value.data(), &check, 4);
}

// A map is a SIGBUS past the end of its file. What is missing there is of no use, pages that were allocated and freed again before they were
// written, and then zeros do; or the file was cut off, and zeros in place of a page that is of use would end the process in LMDB.
int mend_length(MDB_env* env, const std::string& file) {
  MDB_envinfo info;
  MDB_stat shape;
  struct stat st{};
  mdb_env_info(env, &info);
  mdb_env_stat(env, &shape);
  const size_t pages = info.me_last_pgno + 1;
  if (::stat(file.c_str(), &st) != 0) return errno;
  const size_t there = size_t(st.st_size) / shape.ms_psize;
  if (there >= pages) return 0;
  if (truncate(file.c_str(), off_t(pages * shape.ms_psize)) != 0) return errno;
  std::vector<bool> of_use(pages - there, true);
  MDB_txn* txn = nullptr;
  MDB_cursor* cursor = nullptr;
  constexpr MDB_dbi FREE_PAGES = 0;   // transaction -> count, page numbers
  int rc = mdb_txn_begin(env, nullptr, MDB_RDONLY, &txn);
  if (rc) return rc;
  MDB_val key, value;
  rc = mdb_cursor_open(txn, FREE_PAGES, &cursor);
  for (MDB_cursor_op op = MDB_FIRST; !rc && !(rc = mdb_cursor_get(cursor, &key, &value, op)); op = MDB_NEXT)
    for (size_t at = sizeof(size_t), page; at + sizeof page <= value.mv_size; at += sizeof page) {
      std::memcpy(&page, static_cast<const uint8_t*>(value.mv_data) + at, sizeof page);
      if (page >= there && page < pages) of_use[page - there] = false;
    }
  if (cursor) mdb_cursor_close(cursor);
  mdb_txn_abort(txn);
  if (rc != MDB_NOTFOUND) return rc;
  return std::find(of_use.begin(), of_use.end(), true) == of_use.end() ? 0 : MDB_CORRUPTED;
}

}  // namespace

GroupKey group_key(const Owner& owner, const uint8_t* extent_key) {
  GroupKey out;
  std::memcpy(out.data(), owner.data(), OWNER_BYTES);
  std::memcpy(out.data() + OWNER_BYTES, extent_key, KEY_BYTES);
  return out;
}

NameKey name_key(const Owner& owner, const uint8_t* extent_key, uint64_t write_id) {
  NameKey out;
  std::memcpy(out.data(), owner.data(), OWNER_BYTES);
  std::memcpy(out.data() + OWNER_BYTES, extent_key, KEY_BYTES);
  std::memcpy(out.data() + GROUP_BYTES, &write_id, 8);
  return out;
}

EntryKey entry_key(const Owner& owner, const uint8_t* extent_key, uint64_t write_id, uint8_t shard) {
  EntryKey out;
  const NameKey name = name_key(owner, extent_key, write_id);
  std::memcpy(out.data(), name.data(), NAME_BYTES);
  out[NAME_BYTES] = shard;
  return out;
}

EntryKey entry_key_of(const RecordView& view) {
  const RecordHead& h = view.head();
  return entry_key(owner_of_entry(h.owner), h.extent_key, h.write_id, h.shard);
}

NameKey name_of_entry(const EntryKey& key) {
  NameKey out;
  std::memcpy(out.data(), key.data(), NAME_BYTES);
  return out;
}

Owner owner_of_entry(const uint8_t* key) {
  Owner out;
  std::memcpy(out.data(), key, OWNER_BYTES);
  return out;
}

RecencyKey recency_key(const uint8_t* entry_key, uint8_t queue, uint32_t bucket, uint32_t start_block) {
  RecencyKey out;
  uint8_t* p = out.data();
  *p++ = queue;
  std::memcpy(p, entry_key, OWNER_BYTES), p += OWNER_BYTES;
  store_be32(p, bucket), p += 4;
  store_be32(p, ~start_block), p += 4;
  std::memcpy(p, entry_key + OWNER_BYTES, ENTRY_KEY_BYTES - OWNER_BYTES);
  return out;
}

EntryKey entry_key_of_recency(const uint8_t* row) {
  EntryKey out;
  std::memcpy(out.data(), row + 1, OWNER_BYTES);
  std::memcpy(out.data() + OWNER_BYTES, row + 1 + OWNER_BYTES + 8, ENTRY_KEY_BYTES - OWNER_BYTES);
  return out;
}

uint32_t bucket_of_recency(const uint8_t* row) { return load_be32(row + 1 + OWNER_BYTES); }

RecencyValue recency_value(const RecencyKey& key, uint32_t record_4k) {
  return {record_4k, check_of(key.data(), key.size(), &record_4k, 4)};
}

std::vector<uint8_t> encode_entry(const EntryKey& key, const RecordView& view, uint32_t segment, uint64_t offset, uint32_t bucket,
                                  bool reused) {
  const RecordHead& h = view.head();
  std::vector<uint8_t> tail;
  int64_t last = h.start_block;
  for (uint32_t i = 0; i < h.earlier_count; i++) {
    const int64_t delta = int64_t(view.earlier()[i]) - last;
    put_varint(tail, uint64_t(delta) << 1 ^ uint64_t(delta >> 63));
    last = view.earlier()[i];
  }
  for (uint32_t p = 0; p < h.plane_count;) {
    uint32_t run = 1;
    while (p + run < h.plane_count && view.planes()[p + run].shard_bytes == view.planes()[p].shard_bytes) run++;
    put_varint(tail, run);
    put_varint(tail, view.planes()[p].shard_bytes / SHARD_ALIGN);
    p += run;
  }
  EntryFixed f{};
  f.segment = segment;
  f.offset_4k = uint32_t(offset / RECORD_ALIGN);
  f.record_bytes = uint32_t(h.record_bytes);
  f.bucket = bucket;
  f.start_block = h.start_block;
  f.pg = h.pg;
  f.block_bytes = h.block_bytes;
  f.kv_group = h.kv_group;
  f.depth = h.depth;
  f.block_count = h.block_count;
  f.earlier_count = h.earlier_count;
  f.version = ENTRY_VERSION;
  f.retention_class = h.retention_class;
  f.k = h.k, f.m = h.m, f.cipher = h.cipher, f.plane_count = h.plane_count;
  f.write_epoch = h.write_epoch;
  f.layout_tag = h.layout_tag;
  f.fidelity = h.fidelity;
  f.reused = reused;
  f.tail_bytes = uint16_t(tail.size());
  std::vector<uint8_t> value(sizeof f + 8 * size_t(h.block_count) + tail.size());
  std::memcpy(value.data(), &f, sizeof f);
  std::memcpy(value.data() + sizeof f, view.tags(), 8 * size_t(h.block_count));
  std::memcpy(value.data() + sizeof f + 8 * size_t(h.block_count), tail.data(), tail.size());
  seal_value(key, value);
  return value;
}

std::vector<uint8_t> with_last_use(const EntryKey& key, MDB_val value, uint32_t bucket, uint8_t retention_class, bool reused) {
  const auto* p = static_cast<const uint8_t*>(value.mv_data);
  std::vector<uint8_t> out(p, p + value.mv_size);
  std::memcpy(out.data() + offsetof(EntryFixed, bucket), &bucket, 4);
  out[offsetof(EntryFixed, retention_class)] = retention_class;
  out[offsetof(EntryFixed, reused)] = reused;
  seal_value(key, out);
  return out;
}

bool decode_front(MDB_val key, MDB_val value, EntryFixed& out) {
  if (key.mv_size != ENTRY_KEY_BYTES || value.mv_size < sizeof out) return false;
  std::memcpy(&out, value.mv_data, sizeof out);
  return out.version == ENTRY_VERSION && value.mv_size == sizeof out + 8 * size_t(out.block_count) + out.tail_bytes;
}

bool decode_entry(MDB_val key, MDB_val value, Entry& out) {
  const auto* p = static_cast<const uint8_t*>(value.mv_data);
  if (!decode_front(key, value, out.fixed)) return false;
  const EntryFixed& f = out.fixed;
  if (f.check != check_of(key.mv_data, key.mv_size, p + 4, value.mv_size - 4)) return false;
  out.tags = p + sizeof f;
  out.tail = out.tags + 8 * size_t(f.block_count);
  return f.block_count >= 1 && f.block_count <= BLOCKS_PER_EXTENT_MAX && f.earlier_count <= EARLIER_MAX;
}

bool Entry::earlier(uint32_t* out) const {
  const uint8_t *p = tail, *end = tail + fixed.tail_bytes;
  int64_t last = fixed.start_block;
  for (uint32_t i = 0; i < fixed.earlier_count; i++) {
    uint64_t v;
    if (!get_varint(p, end, v)) return false;
    last += int64_t(v >> 1) ^ -int64_t(v & 1);
    out[i] = uint32_t(last);
  }
  return true;
}

bool Entry::shard_bytes(std::vector<uint32_t>& out) const {
  const uint8_t *p = tail, *end = tail + fixed.tail_bytes;
  uint64_t run, units;
  for (uint32_t i = 0; i < fixed.earlier_count; i++)
    if (!get_varint(p, end, run)) return false;
  out.clear();
  uint64_t pieces = 0;
  while (out.size() < fixed.plane_count) {
    if (!get_varint(p, end, run) || !get_varint(p, end, units)) return false;
    if (run < 1 || run > fixed.plane_count - out.size() || units > BLOCK_BYTES_MAX / SHARD_ALIGN) return false;
    out.insert(out.end(), run, uint32_t(units * SHARD_ALIGN));
    pieces += run * units * SHARD_ALIGN * fixed.block_count;
  }
  return p == end && head_bytes() + checks_bytes_of(fixed.plane_count, fixed.block_count) + pieces == fixed.record_bytes;
}

Index::Index(const std::string& dir, uint64_t map_bytes, bool fresh) : map_bytes_(map_bytes) {
  mkdir(dir.c_str(), 0755);
  const auto fail = [this](const char* where, int rc) {
    if (env) mdb_env_close(env);
    throw IndexFault(where, rc);
  };
  if (int rc = mdb_env_create(&env)) fail("create", rc);
  mdb_env_set_maxdbs(env, 8);
  mdb_env_set_maxreaders(env, READERS_MAX);
  mdb_env_set_mapsize(env, map_bytes);
  // NOSYNC: the store says when to sync. NORDAHEAD: lookups are random. No WRITEMAP: a full disk is then an answer, not a SIGBUS.
  if (int rc = mdb_env_open(env, dir.c_str(), MDB_NOSYNC | MDB_NOTLS | MDB_NORDAHEAD | MDB_NOMEMINIT, 0644)) fail("open", rc);
  if (int rc = mend_length(env, dir + "/data.mdb")) fail("length", rc);
  MDB_txn* txn = nullptr;
  if (int rc = mdb_txn_begin(env, nullptr, 0, &txn)) fail("begin", rc);
  for (auto [name, dbi] : {std::pair{"extents", &extents}, {"recency", &recency}, {"freed", &freed}})
    if (int rc = mdb_dbi_open(txn, name, fresh ? MDB_CREATE : 0, dbi)) {
      mdb_txn_abort(txn);
      fail("table", rc);
    }
  if (int rc = mdb_txn_commit(txn)) fail("commit", rc);
}

Index::~Index() {
  for (const Slot& slot : pool_) {
    mdb_cursor_close(slot.extents);
    mdb_txn_abort(slot.txn);
  }
  if (env) mdb_env_close(env);
}

Index::Reader::Reader(Index& index) : index_(index) {
  {
    std::lock_guard lock(index.pool_mutex_);
    if (!index.pool_.empty()) {
      txn = index.pool_.back().txn;
      extents = index.pool_.back().extents;
      index.pool_.pop_back();
    }
  }
  if (!txn) {
    if (int rc = mdb_txn_begin(index.env, nullptr, MDB_RDONLY, &txn)) throw IndexFault("read", rc);
    if (int rc = mdb_cursor_open(txn, index.extents, &extents)) {
      mdb_txn_abort(txn);
      throw IndexFault("cursor", rc);
    }
    return;
  }
  int rc = mdb_txn_renew(txn);
  if (!rc) rc = mdb_cursor_renew(txn, extents);
  if (rc) {
    mdb_cursor_close(extents);
    mdb_txn_abort(txn);
    throw IndexFault("renew", rc);
  }
}

Index::Reader::~Reader() {
  mdb_txn_reset(txn);
  {
    std::lock_guard lock(index_.pool_mutex_);
    if (index_.pool_.size() < POOL_MAX) {
      index_.pool_.push_back({txn, extents});
      return;
    }
  }
  mdb_cursor_close(extents);
  mdb_txn_abort(txn);
}

void Index::Reader::refresh() {
  mdb_txn_reset(txn);
  int rc = mdb_txn_renew(txn);
  if (!rc) rc = mdb_cursor_renew(txn, extents);
  if (rc) throw IndexFault("renew", rc);
}

MDB_txn* Index::begin_write() {
  MDB_txn* txn = nullptr;
  if (int rc = mdb_txn_begin(env, nullptr, 0, &txn)) throw IndexFault("begin", rc);
  return txn;
}

uint64_t Index::bytes_used(MDB_txn* txn) const {
  uint64_t bytes = 0;
  for (MDB_dbi dbi : {extents, recency, freed}) {
    MDB_stat s;
    if (mdb_stat(txn, dbi, &s) == 0) bytes += (s.ms_branch_pages + s.ms_leaf_pages + s.ms_overflow_pages) * s.ms_psize;
  }
  return bytes;
}

uint64_t Index::entries() const {
  MDB_txn* txn = nullptr;
  MDB_stat s{};
  if (mdb_txn_begin(env, nullptr, MDB_RDONLY, &txn)) return 0;
  mdb_stat(txn, extents, &s);
  mdb_txn_abort(txn);
  return s.ms_entries;
}

bool Index::set_stop(uint64_t stop) {
  MDB_txn* txn = begin_write();
  MDB_dbi unnamed = 0;
  MDB_val key = val(STOP_KEY, sizeof STOP_KEY), value = val(&stop, sizeof stop);
  int rc = mdb_dbi_open(txn, nullptr, 0, &unnamed);
  if (!rc) rc = mdb_put(txn, unnamed, &key, &value, 0);
  if (rc) mdb_txn_abort(txn);
  else rc = mdb_txn_commit(txn);
  if (rc && !out_of_space(rc)) throw IndexFault("stop", rc);
  return rc == 0;
}

uint64_t Index::stop() {
  const Reader reader(*this);
  MDB_dbi unnamed = 0;
  MDB_val key = val(STOP_KEY, sizeof STOP_KEY), value;
  int rc = mdb_dbi_open(reader.txn, nullptr, 0, &unnamed);
  if (!rc) rc = mdb_get(reader.txn, unnamed, &key, &value);
  if (rc && rc != MDB_NOTFOUND) throw IndexFault("stop", rc);
  uint64_t stop = 0;
  if (!rc && value.mv_size == sizeof stop) std::memcpy(&stop, value.mv_data, sizeof stop);
  return stop;
}

uint64_t Index::last_txn() const {
  MDB_envinfo info{};
  mdb_env_info(env, &info);
  return info.me_last_txnid;
}

}  // namespace kv
