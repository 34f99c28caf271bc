// The Python face of the store: every verb, so that tests and gc drive it directly. The GIL is not held while anything is done.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdlib>

#include "bind.hpp"
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

nb::list promise(Store& store, const nb::bytes& owner, Keys keys, Ids write_ids, uint32_t bucket, uint32_t pin_seconds, bool touch, uint8_t retention_class) {
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
  for (const auto& [id, totals] : rows) out.append(nb::make_tuple(id.retention_class, to_bytes(id.owner.data(), OWNER_BYTES), totals.rows, totals.bytes));
  return out;
}

nb::list peek(Store& store, uint8_t retention_class, const nb::bytes& owner, uint32_t limit, const nb::bytes& after) {
  const QueueId queue{retention_class, fixed<OWNER_BYTES>(owner, "owner")};
  const bool past = after.size() > 0;
  const RecencyKey from = past ? fixed<RECENCY_KEY_BYTES>(after, "after") : RecencyKey{};
  std::vector<PeekedRow> rows;
  {
    nb::gil_scoped_release free;
    rows = impl(store).peek(queue, limit, past ? &from : nullptr);
  }
  nb::list out;
  for (const PeekedRow& r : rows) out.append(nb::make_tuple(bucket_of_recency(r.row.data()), to_bytes(r.row.data(), RECENCY_KEY_BYTES), r.bytes));
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
  std::vector<GhostReason> reasons;
  {
    nb::gil_scoped_release free;
    reasons = impl(store).ghosts(tag, keys.data(), uint32_t(keys.shape(0)));
  }
  nb::list out;
  for (GhostReason r : reasons) out.append(uint32_t(r));
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
  out["start_mode"] = name_of(impl(store).start_mode());
  out["last_fault"] = impl(store).last_fault();
  out["start_reason"] = impl(store).start_reason();
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

uint64_t bulk_index(Store& store, const nb::bytes& owner, Keys keys, Ids write_ids, uint32_t block_count, uint32_t block_bytes, uint32_t start_block,
                    uint32_t bucket, uint8_t k, uint8_t m, uint8_t shard, uint8_t retention_class) {
  const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
  if (keys.shape(0) != write_ids.shape(0)) throw nb::value_error("as many write ids as keys");
  if (block_count < 1 || block_count > BLOCKS_PER_EXTENT_MAX || block_bytes < 1 || uint64_t(block_count) * block_bytes > EXTENT_BYTES_MAX || k < 1 || k > K_MAX ||
      m > M_MAX || shard >= k + m || retention_class >= CLASSES_MAX)
    throw nb::value_error("shape out of range");
  nb::gil_scoped_release free;
  return impl(store).bulk_index(tag, keys.data(), write_ids.data(), keys.shape(0), {block_count, block_bytes, start_block, bucket, k, m, shard, retention_class});
}

std::unique_ptr<Store> make_store(const std::string& dir, uint64_t capacity_bytes, uint64_t segment_bytes, uint64_t index_map_bytes, bool strict_sync,
                                  uint32_t bucket_seconds, uint32_t pins_max, bool virtual_clock, uint64_t disk_reserve_bytes, nb::object retention_seconds) {
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

}  // namespace

}  // namespace kv

namespace kv {
namespace {

// (extents key, value, recency key, value) of a record at a place: what a put writes into the index.
nb::tuple index_rows(const nb::bytes& record, uint32_t segment, uint64_t offset_bytes, uint32_t bucket) {
  std::vector<uint64_t> words(record.size() / 8 + 1);
  std::memcpy(words.data(), record.c_str(), record.size());
  const RecordView view{reinterpret_cast<const uint8_t*>(words.data())};
  if (check_head(view.base, record.size()) != Status::OK) throw nb::value_error("not a sound head");
  const RecordHead& h = view.head();
  Owner owner;
  std::memcpy(owner.data(), h.owner, OWNER_BYTES);
  const EntryKey key = entry_key(owner, h.extent_key, h.write_id, h.shard);
  const std::vector<uint8_t> value = encode_entry(key, view, segment, offset_bytes, bucket);
  const RecencyKey row = recency_key(key.data(), h.retention_class, bucket, h.start_block);
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
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::register_exception_translator(translate);
  nb::class_<PyReadRef>(m, "ReadRef", "A shard held open for reading; its bytes stay where they are until close().")
      .def("read", [](PyReadRef& r) {
        if (!r.open) throw nb::value_error("closed");
        std::vector<uint8_t> out(r.ref.record_bytes);
        {
          nb::gil_scoped_release free;
          if (!SegmentFiles::read_all(r.ref.fd(), out.data(), out.size(), r.ref.offset)) out.clear();
        }
        return to_bytes(out.data(), out.size());
      })
      .def("close", [](PyReadRef& r) { r.ref = ReadRef(); r.open = false; })
      .def_prop_ro("segment", [](PyReadRef& r) { return r.open ? r.ref.segment_id() : 0; })
      .def_prop_ro("offset", [](PyReadRef& r) { return r.ref.offset; })
      .def_prop_ro("record_bytes", [](PyReadRef& r) { return r.ref.record_bytes; })
      .def_prop_ro("shard_bytes", [](PyReadRef& r) { nb::list l; for (uint32_t b : r.ref.shard_bytes) l.append(b); return l; });
  nb::class_<Store>(m, "Store", "The storage of one node (kernels/store.hpp). Statuses are the numbers of kernels/common.hpp.")
      .def(nb::new_(&make_store), nb::arg("dir"), nb::kw_only(), nb::arg("capacity_bytes") = 0, nb::arg("segment_bytes") = 256u << 20, nb::arg("index_map_bytes") = 0,
           nb::arg("strict_sync") = false, nb::arg("bucket_seconds") = 60, nb::arg("pins_max") = 1u << 20, nb::arg("virtual_clock") = false,
           nb::arg("disk_reserve_bytes") = 32u << 20, nb::arg("retention_seconds") = nb::none())
      .def("discover", &discover, nb::arg("owner"), nb::arg("keys"), "DISCOVER reply body (kernels/wire.hpp)")
      .def("promise", &promise, nb::arg("owner"), nb::arg("keys"), nb::arg("write_ids"), nb::kw_only(), nb::arg("bucket") = 0, nb::arg("pin_seconds") = 0,
           nb::arg("touch") = false, nb::arg("retention_class") = 255, "[(status, shard mask)]")
      .def("withdraw", &withdraw, nb::arg("owner"), nb::arg("keys"), nb::arg("write_ids"), "[status]")
      .def("put", &put, nb::arg("record"), "status")
      .def("read", &read_record, nb::arg("owner"), nb::arg("extent_key"), nb::arg("write_id"), nb::arg("shard"), "(status, record bytes)")
      .def("open_read", &open_read, nb::arg("owner"), nb::arg("extent_key"), nb::arg("write_id"), nb::arg("shard"), nb::keep_alive<0, 1>(), "ReadRef, or a status")
      .def("report_corrupt", [](Store& s, const nb::bytes& owner, const nb::bytes& extent_key, uint64_t write_id, uint8_t shard) {
             const Owner tag = fixed<OWNER_BYTES>(owner, "owner");
             const Key key = fixed<KEY_BYTES>(extent_key, "extent_key");
             nb::gil_scoped_release free;
             s.report_corrupt(tag, key.data(), write_id, shard);
           }, nb::arg("owner"), nb::arg("extent_key"), nb::arg("write_id"), nb::arg("shard"))
      .def("bucket_now", &Store::bucket_now)
      .def("close", &Store::close, nb::arg("clean") = true, release())
      .def("queues", &queues, "[(class, owner, rows, bytes)]")
      .def("peek", &peek, nb::arg("retention_class"), nb::arg("owner"), nb::arg("limit"), nb::arg("after") = nb::bytes("", 0), "[(bucket, row, bytes)], first to go first")
      .def("evict", &evict, nb::arg("rows"), nb::arg("reason"), "[(ordinal in rows, class, bytes, age seconds)] of those that went")
      .def("ghosts", &ghosts, nb::arg("owner"), nb::arg("keys"), "[reason]: 0 unknown, 1 expired, 2 evicted, 3 withdrawn, 4 corrupt")
      .def("set_pressure_at", [](Store& s, uint64_t bytes) { impl(s).set_pressure_at(bytes); }, nb::arg("bytes"))
      .def("wait_pressure", [](Store& s, double timeout_seconds) { return impl(s).wait_pressure(timeout_seconds); }, nb::arg("timeout_seconds"), release())
      .def("usage", [](Store& s) { const Usage u = impl(s).usage(); return nb::make_tuple(u.used_bytes, u.zombie_bytes, u.capacity_bytes, u.disk_free_bytes, u.index_share); },
           "(used, zombie, capacity, disk free: bytes; index share)")
      .def("poke", [](Store& s) { impl(s).poke(); }, release(), "wakes wait_pressure")
      .def("set_retentions", [](Store& s, const nb::sequence& seconds) { impl(s).set_retentions(retentions_of(seconds)); }, nb::arg("seconds"))
      .def("wait_started", [](Store& s, double timeout_seconds) { return impl(s).wait_started(timeout_seconds); }, nb::arg("timeout_seconds"), release())
      .def("flush", [](Store& s) { impl(s).flush(); }, release())
      .def("check_integrity", &check_integrity, nb::arg("deep") = false)
      .def("bulk_index", &bulk_index, nb::arg("owner"), nb::arg("keys"), nb::arg("write_ids"), nb::kw_only(), nb::arg("block_count") = 27,
           nb::arg("block_bytes") = 113920, nb::arg("start_block") = 0, nb::arg("bucket") = 0, nb::arg("k") = 10, nb::arg("m") = 2, nb::arg("shard") = 0,
           nb::arg("retention_class") = 2)
      .def("stats", &stats);
  m.def("index_rows", &index_rows, nb::arg("record"), nb::arg("segment"), nb::arg("offset_bytes"), nb::arg("bucket"));
  m.def("segment_footer", &footer, nb::arg("segment"), nb::arg("data_end_bytes"), nb::arg("created_unix_ms"), nb::arg("entries"));
  m.def("check_record", [](const nb::bytes& record) {
    std::vector<uint64_t> words(record.size() / 8 + 1);
    std::memcpy(words.data(), record.c_str(), record.size());
    nb::gil_scoped_release free;
    return uint32_t(check_record(reinterpret_cast<const uint8_t*>(words.data()), record.size()));
  }, nb::arg("record"), "Status of a whole record: head, checks, every piece.");
}
