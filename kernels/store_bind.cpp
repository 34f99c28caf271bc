// The Python face of the store: every verb, so that tests and gc drive it directly. The GIL is not held while anything is done.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdlib>

#include "bind.hpp"
#include "server_bind.hpp"
#include "store_impl.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

using Keys = nb::ndarray<const uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const uint64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

StoreImpl& impl(Store& store) { return static_cast<StoreImpl&>(store); }

nb::bytes to_bytes(const void* p, size_t n) { return nb::bytes(static_cast<const char*>(p), n); }

template <size_t N>
std::array<uint8_t, N> fixed(const nb::bytes& b, const char* what) {
  if (b.size() != N) throw nb::value_error((std::string(what) + " must be " + std::to_string(N) + " bytes").c_str());
  std::array<uint8_t, N> out;
  std::memcpy(out.data(), b.c_str(), N);
  return out;
}

std::vector<wire::WritingName> names_of(const Keys& keys, const Ids& write_ids) {
  if (keys.shape(0) != write_ids.shape(0)) throw nb::value_error("as many write ids as keys");
  std::vector<wire::WritingName> names(keys.shape(0));
  for (size_t i = 0; i < names.size(); i++) {
    std::memcpy(names[i].extent_key, keys.data() + i * KEY_BYTES, KEY_BYTES);
    names[i].write_id = write_ids.data()[i];
  }
  return names;
}

nb::bytes discover(Store& store, const nb::bytes& owner, Keys keys) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release free;
    store.discover(tag, keys.data(), uint32_t(keys.shape(0)), out);
  }
  return to_bytes(out.data(), out.size());
}

nb::list promise(Store& store, const nb::bytes& owner, Keys keys, Ids write_ids, uint32_t bucket, uint32_t pin_seconds, bool touch,
                 uint8_t retention_class) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  const std::vector<wire::WritingName> names = names_of(keys, write_ids);
  wire::PromiseRequest request{};
  std::memcpy(request.owner, tag.data(), OWNER_BYTES);
  request.count = uint32_t(names.size());
  request.bucket = bucket;
  request.flags = uint8_t((pin_seconds ? wire::PROMISE_PIN : 0) | (touch ? wire::PROMISE_TOUCH : 0));
  request.retention_class = retention_class;
  request.pin_seconds = uint16_t(pin_seconds);
  std::vector<wire::PromiseAnswer> answers(names.size());
  {
    nb::gil_scoped_release free;
    store.promise(request, names.data(), answers.data());
  }
  nb::list out;
  for (const wire::PromiseAnswer& a : answers) out.append(nb::make_tuple(a.status, a.shard_mask));
  return out;
}

nb::list withdraw(Store& store, const nb::bytes& owner, Keys keys, Ids write_ids) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  const std::vector<wire::WritingName> names = names_of(keys, write_ids);
  std::vector<uint32_t> statuses(names.size());
  {
    nb::gil_scoped_release free;
    store.withdraw(tag, names.data(), uint32_t(names.size()), statuses.data());
  }
  nb::list out;
  for (uint32_t s : statuses) out.append(s);
  return out;
}

uint32_t put(Store& store, const nb::bytes& record) {
  const size_t padded = align_up(std::max<size_t>(record.size(), 1), RECORD_ALIGN);
  if (record.size() > RECORD_BYTES_MAX) return uint32_t(Status::TOO_LARGE);
  const std::unique_ptr<uint8_t, decltype(&std::free)> memory(static_cast<uint8_t*>(std::aligned_alloc(RECORD_ALIGN, padded)), &std::free);
  if (!memory) throw std::bad_alloc();
  std::memcpy(memory.get(), record.c_str(), record.size());
  nb::gil_scoped_release free;
  return uint32_t(store.put(memory.get(), record.size()));
}

// (status, record bytes); the bytes are as they lie on disk, unchecked.
nb::tuple read_record(Store& store, const nb::bytes& owner, const nb::bytes& extent_key, uint64_t write_id, uint8_t shard) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  wire::ReadExtent extent{};
  std::memcpy(extent.extent_key, fixed<KEY_BYTES>(extent_key, "extent_key").data(), KEY_BYTES);
  extent.write_id = write_id;
  extent.shard = shard;
  std::vector<uint8_t> out;
  Status status;
  {
    nb::gil_scoped_release free;
    ReadRef ref;
    status = store.open_read(tag, extent, ref);
    if (status == Status::OK) {
      out.resize(ref.record_bytes);
      if (!SegmentFiles::read_all(ref.fd(), out.data(), out.size(), ref.offset)) status = Status::IO_ERROR, out.clear();
    }
  }
  return nb::make_tuple(uint32_t(status), to_bytes(out.data(), out.size()));
}

// A shard held open for reading, for tests: its bytes stay until close().
struct PyReadRef {
  ReadRef ref;
  bool open = true;
};

nb::object open_read(Store& store, const nb::bytes& owner, const nb::bytes& extent_key, uint64_t write_id, uint8_t shard) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  wire::ReadExtent extent{};
  std::memcpy(extent.extent_key, fixed<KEY_BYTES>(extent_key, "extent_key").data(), KEY_BYTES);
  extent.write_id = write_id;
  extent.shard = shard;
  PyReadRef out;
  Status status;
  {
    nb::gil_scoped_release free;
    status = store.open_read(tag, extent, out.ref);
  }
  if (status != Status::OK) return nb::cast(uint32_t(status));
  return nb::cast(std::move(out));
}

nb::list queues(Store& store) {
  std::vector<std::pair<QueueId, QueueTotals>> rows;
  {
    nb::gil_scoped_release free;
    rows = impl(store).queues();
  }
  nb::list out;
  for (const auto& [id, totals] : rows)
    out.append(nb::make_tuple(id.queue, to_bytes(id.owner.data(), OWNER_BYTES), totals.rows, totals.bytes));
  return out;
}

nb::list peek(Store& store, uint8_t queue_byte, const nb::bytes& owner, uint32_t limit, const nb::bytes& after) {
  const QueueId queue{queue_byte, fixed<OWNER_BYTES>(owner, "owner")};
  const bool past = after.size() > 0;
  const RecencyKey from = past ? fixed<RECENCY_KEY_BYTES>(after, "after") : RecencyKey{};
  std::vector<PeekedRow> rows;
  {
    nb::gil_scoped_release free;
    rows = impl(store).peek(queue, limit, past ? &from : nullptr);
  }
  nb::list out;
  for (const PeekedRow& r : rows)
    out.append(nb::make_tuple(bucket_of_recency(r.row.data()), to_bytes(r.row.data(), RECENCY_KEY_BYTES), r.bytes));
  return out;
}

nb::list evict(Store& store, const nb::list& rows, uint32_t reason) {
  std::vector<RecencyKey> keys;
  for (nb::handle row : rows) keys.push_back(fixed<RECENCY_KEY_BYTES>(nb::cast<nb::bytes>(row), "row"));
  if (reason < uint32_t(GhostReason::EXPIRED) || reason > uint32_t(GhostReason::CORRUPT)) throw nb::value_error("reason must be 1 to 4");
  std::vector<Evicted> gone;
  {
    nb::gil_scoped_release free;
    gone = impl(store).evict(keys, GhostReason(reason));
  }
  nb::list out;
  for (const Evicted& e : gone) out.append(nb::make_tuple(e.row, e.retention_class, e.bytes, e.age_seconds));
  return out;
}

nb::list ghosts(Store& store, const nb::bytes& owner, Keys keys) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  std::vector<std::pair<uint32_t, GhostRow>> found;
  {
    nb::gil_scoped_release free;
    found = impl(store).ghosts(tag, keys.data(), uint32_t(keys.shape(0)));
  }
  nb::list out;
  for (const auto& [at, row] : found)
    out.append(nb::make_tuple(at, uint32_t(row.reason), uint32_t(row.retention_class), row.last_bucket, to_bytes(row.tags, row.block_count)));
  return out;
}

nb::dict stats(Store& store) {
  std::vector<std::pair<std::string, uint64_t>> rows;
  {
    nb::gil_scoped_release free;
    rows = impl(store).stats();
  }
  nb::dict out;
  for (const auto& [name, value] : rows) out[name.c_str()] = value;
  out["write_seconds"] = histogram(impl(store).write_seconds);
  out["start_mode"] = name_of(impl(store).start_mode());
  out["last_fault"] = impl(store).last_fault();
  out["start_reason"] = impl(store).start_reason();
  out["filter_start"] = impl(store).filter_start();
  return out;
}

nb::list check_integrity(Store& store, bool deep) {
  std::vector<std::string> problems;
  {
    nb::gil_scoped_release free;
    problems = impl(store).check_integrity(deep);
  }
  nb::list out;
  for (const std::string& p : problems) out.append(p);
  return out;
}

std::array<uint32_t, CLASSES_MAX> retentions_of(const nb::sequence& seconds) {
  if (nb::len(seconds) != CLASSES_MAX) throw nb::value_error("retention_seconds: 16 numbers, one for each class");
  std::array<uint32_t, CLASSES_MAX> out;
  for (uint32_t c = 0; c < CLASSES_MAX; c++) out[c] = nb::cast<uint32_t>(seconds[c]);
  return out;
}

uint64_t bulk_index(Store& store, const nb::bytes& owner, Keys keys, Ids write_ids, uint32_t block_count, uint32_t block_bytes,
                    uint32_t start_block, uint32_t bucket, uint8_t k, uint8_t m, uint8_t shard, uint8_t retention_class) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  if (keys.shape(0) != write_ids.shape(0)) throw nb::value_error("as many write ids as keys");
  if (block_count < 1 || block_count > BLOCKS_PER_EXTENT_MAX || block_bytes < 1 || uint64_t(block_count) * block_bytes > EXTENT_BYTES_MAX)
    throw nb::value_error("blocks out of range");
  if (k < 1 || k > K_MAX || m > M_MAX || shard >= k + m || retention_class >= CLASSES_MAX) throw nb::value_error("shape out of range");
  const SyntheticShape shape{block_count, block_bytes, start_block, bucket, k, m, shard, retention_class};
  nb::gil_scoped_release free;
  return impl(store).bulk_index(tag, keys.data(), write_ids.data(), keys.shape(0), shape);
}

nb::tuple usage(Store& store) {
  const Usage u = impl(store).usage();
  return nb::make_tuple(u.used_bytes, u.zombie_bytes, u.capacity_bytes, u.disk_free_bytes, u.index_share);
}

void report_corrupt(Store& store, const nb::bytes& owner, const nb::bytes& extent_key, uint64_t write_id, uint8_t shard) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  const Key key = fixed<KEY_BYTES>(extent_key, "extent_key");
  nb::gil_scoped_release free;
  store.report_corrupt(tag, key.data(), write_id, shard);
}

nb::list suspect(Store& store, const nb::bytes& owner, const nb::list& shards) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  std::vector<wire::SuspectShard> asked;
  for (nb::handle each : shards) {
    const auto [key, write_id, shard] = nb::cast<std::tuple<nb::bytes, uint64_t, uint8_t>>(each);
    wire::SuspectShard s{};
    const Key extent_key = fixed<KEY_BYTES>(key, "extent_key");
    std::memcpy(s.extent_key, extent_key.data(), KEY_BYTES);
    s.write_id = write_id;
    s.shard = shard;
    asked.push_back(s);
  }
  std::vector<uint32_t> statuses(asked.size());
  {
    nb::gil_scoped_release free;
    store.suspect(tag, asked.data(), uint32_t(asked.size()), statuses.data());
  }
  nb::list out;
  for (const uint32_t status : statuses) out.append(status);
  return out;
}

nb::tuple scrub(Store& store, const nb::bytes& after, uint64_t bytes_max) {
  const auto* at = reinterpret_cast<const uint8_t*>(after.c_str());
  if (after.size() && after.size() != ENTRY_KEY_BYTES) throw nb::value_error("after: what scrub() gave, or nothing");
  const std::vector<uint8_t> from(at, at + after.size());
  Scrubbed done;
  {
    nb::gil_scoped_release free;
    done = impl(store).scrub(from, bytes_max);
  }
  return nb::make_tuple(to_bytes(done.after.data(), done.after.size()), done.bytes, done.damaged);
}

nb::tuple take_damages(Store& store) {
  const auto [damages, count] = impl(store).take_damages();
  nb::list out;
  for (const Damage& d : damages) out.append(nb::make_tuple(d.segment, d.offset, d.record_bytes, d.shard, d.read));
  return nb::make_tuple(out, count);
}

nb::bytes read_ref(PyReadRef& r) {
  if (!r.open) throw nb::value_error("closed");
  std::vector<uint8_t> out(r.ref.record_bytes);
  {
    nb::gil_scoped_release free;
    if (!SegmentFiles::read_all(r.ref.fd(), out.data(), out.size(), r.ref.offset)) out.clear();
  }
  return to_bytes(out.data(), out.size());
}

nb::list shard_bytes_of_ref(PyReadRef& r) {
  nb::list out;
  for (uint32_t bytes : r.ref.shard_bytes) out.append(bytes);
  return out;
}

std::unique_ptr<Store> make_store(const std::string& dir, uint64_t capacity_bytes, uint64_t segment_bytes, uint64_t index_map_bytes,
                                  bool strict_sync, uint32_t bucket_seconds, uint32_t pins_max, bool virtual_clock,
                                  uint64_t disk_reserve_bytes, nb::object retention_seconds) {
  StoreConfig config;
  config.dir = dir;
  config.capacity_bytes = capacity_bytes;
  config.segment_bytes = segment_bytes;
  config.index_map_bytes = index_map_bytes;
  config.strict_sync = strict_sync;
  config.bucket_seconds = bucket_seconds;
  config.pins_max = pins_max;
  config.virtual_clock = virtual_clock;
  config.disk_reserve_bytes = disk_reserve_bytes;
  if (!retention_seconds.is_none()) config.retention_seconds = retentions_of(nb::cast<nb::sequence>(retention_seconds));
  std::string why;
  {
    nb::gil_scoped_release free;
    try {
      return Store::open(config);
    } catch (const DirectoryInUse&) {
      throw;
    } catch (const std::runtime_error& e) {
      why = e.what();
    }
  }
  raise_fault("ConfigError", "E122", "data directory " + dir, why);
}

// DirectoryInUse carries the pid: the vocabulary's class where it can be imported.
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const DirectoryInUse& e) {
    try {
      nb::object error = nb::module_::import_("kvstore.errors").attr("DirectoryInUse")(e.pid, e.directory);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error&) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
  }
}

uint32_t check_bytes(const nb::bytes& record) {
  std::vector<uint64_t> words(record.size() / 8 + 1);   // aligned
  std::memcpy(words.data(), record.c_str(), record.size());
  nb::gil_scoped_release free;
  return uint32_t(check_record(reinterpret_cast<const uint8_t*>(words.data()), record.size()));
}

// (extents key, value, recency key, value) of a record at a place: what a put writes into the index.
nb::tuple index_rows(const nb::bytes& record, uint32_t segment, uint64_t offset_bytes, uint32_t bucket, bool reused) {
  std::vector<uint64_t> words(record.size() / 8 + 1);
  std::memcpy(words.data(), record.c_str(), record.size());
  const RecordView view{reinterpret_cast<const uint8_t*>(words.data())};
  if (check_head(view.base, record.size()) != Status::OK) throw nb::value_error("not a sound head");
  const RecordHead& h = view.head();
  const EntryKey key = entry_key_of(view);
  const std::vector<uint8_t> value = encode_entry(key, view, segment, offset_bytes, bucket, reused);
  const RecencyKey row = recency_key(key.data(), queue_of(h.retention_class, reused), bucket, h.start_block);
  const RecencyValue row_value = recency_value(row, uint32_t(align_up(h.record_bytes, RECORD_ALIGN) / RECORD_ALIGN));
  return nb::make_tuple(to_bytes(key.data(), key.size()), to_bytes(value.data(), value.size()), to_bytes(row.data(), row.size()),
                        to_bytes(&row_value, sizeof row_value));
}

nb::bytes footer(uint32_t segment, uint64_t data_end_bytes, uint64_t created_unix_ms, const nb::list& entries) {
  std::vector<std::pair<uint32_t, std::vector<uint8_t>>> heads;
  for (nb::handle item : entries) {
    const auto [offset, head] = nb::cast<std::pair<uint64_t, nb::bytes>>(item);
    heads.emplace_back(uint32_t(offset / RECORD_ALIGN), std::vector<uint8_t>(head.c_str(), head.c_str() + head.size()));
  }
  const std::vector<uint8_t> out = build_footer(segment, data_end_bytes, created_unix_ms, heads);
  return to_bytes(out.data(), out.size());
}

}  // namespace
}  // namespace kv

void bind_store(nb::module_& m) {
  using namespace kv;
  using nb::arg;
  using release = nb::call_guard<nb::gil_scoped_release>;
  const StoreConfig defaults;
  nb::register_exception_translator(translate);
  nb::class_<PyReadRef>(m, "ReadRef", "A shard held open for reading; its bytes stay where they are until close().")
      .def("read", &read_ref)
      .def("close", [](PyReadRef& r) { r.ref = ReadRef(), r.open = false; })
      .def_prop_ro("segment", [](PyReadRef& r) { return r.open ? r.ref.segment_id() : 0; })
      .def_prop_ro("offset", [](PyReadRef& r) { return r.ref.offset; })
      .def_prop_ro("record_bytes", [](PyReadRef& r) { return r.ref.record_bytes; })
      .def_prop_ro("shard_bytes", &shard_bytes_of_ref);
  nb::class_<Store>(m, "Store", "The storage of one node (kernels/store.hpp). Statuses are the numbers of kernels/common.hpp.")
      .def(nb::new_(&make_store), arg("dir"), nb::kw_only(), arg("capacity_bytes") = defaults.capacity_bytes,
           arg("segment_bytes") = defaults.segment_bytes, arg("index_map_bytes") = defaults.index_map_bytes,
           arg("strict_sync") = defaults.strict_sync, arg("bucket_seconds") = defaults.bucket_seconds, arg("pins_max") = defaults.pins_max,
           arg("virtual_clock") = defaults.virtual_clock, arg("disk_reserve_bytes") = defaults.disk_reserve_bytes,
           arg("retention_seconds") = nb::none())
      .def("discover", &discover, arg("owner"), arg("keys"), "DISCOVER reply body (kernels/wire.hpp)")
      .def("promise", &promise, arg("owner"), arg("keys"), arg("write_ids"), nb::kw_only(), arg("bucket") = 0, arg("pin_seconds") = 0,
           arg("touch") = false, arg("retention_class") = 255, "[(status, shard mask)]")
      .def("withdraw", &withdraw, arg("owner"), arg("keys"), arg("write_ids"), "[status]")
      .def("put", &put, arg("record"), "status")
      .def("read", &read_record, arg("owner"), arg("extent_key"), arg("write_id"), arg("shard"), "(status, record bytes)")
      .def("open_read", &open_read, arg("owner"), arg("extent_key"), arg("write_id"), arg("shard"), nb::keep_alive<0, 1>(),
           "ReadRef, or a status")
      .def("report_corrupt", &report_corrupt, arg("owner"), arg("extent_key"), arg("write_id"), arg("shard"))
      .def("suspect", &suspect, arg("owner"), arg("shards"), "[status] of (extent key, write id, shard)")
      .def("take_damages", &take_damages, "([(segment, offset, record bytes, shard, read)], count) of what was dropped since the last call")
      .def("scrub", &scrub, arg("after"), arg("bytes_max"), "(where to go on, or nothing at the end; bytes looked at; damaged records)")
      .def("bucket_now", &Store::bucket_now)
      .def("close", &Store::close, arg("clean") = true, release())
      .def("queues", &queues, "[(class, owner, rows, bytes)]")
      .def("peek", &peek, arg("queue"), arg("owner"), arg("limit"), arg("after") = nb::bytes("", 0),
           "[(bucket, row, bytes)], first to go first")
      .def("evict", &evict, arg("rows"), arg("reason"), "[(ordinal in rows, class, bytes, age seconds)] of those that went")
      .def("ghosts", &ghosts, arg("owner"), arg("keys"), "[(index of the key, reason, class, bucket of last use, one byte of each block's tag)], newest first for each key")
      .def("set_pressure_at", [](Store& s, uint64_t bytes) { impl(s).set_pressure_at(bytes); }, arg("bytes"))
      .def("wait_pressure", [](Store& s, double timeout) { return impl(s).wait_pressure(timeout); }, arg("timeout_seconds"), release())
      .def("usage", &usage, "(used, zombie, capacity, disk free: bytes; index share)")
      .def("poke", [](Store& s) { impl(s).poke(); }, release(), "wakes wait_pressure")
      .def("set_second_chance", [](Store& s, bool on) { impl(s).set_second_chance(on); }, arg("on"))
      .def("set_admission", [](Store& s, bool second_touch, uint64_t budget) { impl(s).set_admission(second_touch, budget); },
           arg("second_touch"), arg("budget_bytes_per_day"))
      .def("admit",
           [](Store& s, const nb::bytes& owner, const Keys& keys, uint32_t bucket) {
             std::vector<uint32_t> votes(keys.shape(0));
             impl(s).admit(fixed<OWNER_BYTES>(owner, "owner"), keys.data(), uint32_t(keys.shape(0)), bucket, votes.data());
             nb::list out;
             for (const uint32_t vote : votes) out.append(vote);
             return out;
           },
           arg("owner"), arg("keys"), arg("bucket"))
      .def("set_retentions", [](Store& s, const nb::sequence& seconds) { impl(s).set_retentions(retentions_of(seconds)); }, arg("seconds"))
      .def("wait_started", [](Store& s, double timeout) { return impl(s).wait_started(timeout); }, arg("timeout_seconds"), release())
      .def("flush", [](Store& s) { impl(s).flush(); }, release())
      .def("check_integrity", &check_integrity, arg("deep") = false)
      .def("bulk_index", &bulk_index, arg("owner"), arg("keys"), arg("write_ids"), nb::kw_only(), arg("block_count") = 27,
           arg("block_bytes") = 113920, arg("start_block") = 0, arg("bucket") = 0, arg("k") = 10, arg("m") = 2, arg("shard") = 0,
           arg("retention_class") = 2)
      .def("stats", &stats);
  m.def("index_rows", &index_rows, arg("record"), arg("segment"), arg("offset_bytes"), arg("bucket"), arg("reused") = false);
  m.def("segment_footer", &footer, arg("segment"), arg("data_end_bytes"), arg("created_unix_ms"), arg("entries"));
  m.def("check_record", &check_bytes, arg("record"), "Status of a whole record: head, checks, every piece.");
}
