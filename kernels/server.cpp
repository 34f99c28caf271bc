// Start, drain and stop of a server; its face in Python.
#include "server.hpp"

#include <errno.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <system_error>

#include "io_engine.hpp"
#include "server_bind.hpp"
#include "server_bulk.hpp"
#include "server_small.hpp"
#include "server_verbs.hpp"

namespace nb = nanobind;

namespace kv {

Server::Server(Store& store, const ServerConfig& config) : shared_(store, config), io_(config.io) {
  shared_.boot_id = random_boot_id();
  auto with_verbs = [&](auto&& step) {   // or without, where nobody insists
    try {
      step();
    } catch (const verbs::Fault& fault) {
      if (config.rdma_device != "auto" || fault.of_setting()) throw;
      rdma_note_ = std::string(fault.code) + " " + fault.what();
      shared_.verbs = nullptr;
      verbs_.reset();
    }
  };
  if (config.rdma_device != "off")
    with_verbs([&] {
      verbs_ = std::make_unique<VerbsServer>(config);
      shared_.verbs = verbs_.get();
    });
  if (config.io != "buffered") reads_ = direct_reads(shared_, io_note_);   // its memory is another kind where a device is to know it
  if (!reads_) {
    reads_ = buffered_reads();
    io_ = "buffered";
  }
  with_verbs([&] {
    if (const Arena* arena = reads_->arena(); arena && verbs_) verbs_->share(*arena);
  });
  port_ = config.port;
  const int listener = listen_on(config.host, port_, config.congestion_control);
  std::vector<BulkLoop*> loops;
  try {
    for (uint32_t i = 0; i < config.bulk_threads; i++) {
      bulk_.push_back(std::make_unique<BulkLoop>(shared_, *reads_));
      loops.push_back(bulk_.back().get());
    }
    std::vector<BulkLoop*> for_records;
    for (uint32_t i = 0; i < config.write_threads; i++) {
      records_.push_back(std::make_unique<BulkLoop>(shared_));
      records_.back()->hand_to(loops);
      for_records.push_back(records_.back().get());
    }
    for (BulkLoop* each : loops) each->hand_to(for_records);
    with_verbs([&] {
      for (auto& b : bulk_)
        if (verbs_) b->share_pool();
    });
    small_ = std::make_unique<SmallLoop>(shared_, listener, loops);
  } catch (...) {
    if (!small_) ::close(listener);
    throw;
  }
  for (auto& b : bulk_) b->start("kv-bulk");
  for (auto& r : records_) r->start("kv-records", true);
  small_->start("kv-small");
}

Server::~Server() { stop(); }

std::string Server::rdma() const { return verbs_ ? verbs_->device->name : ""; }

bool Server::drain(double timeout_seconds) {
  if (!small_) return true;
  shared_.draining.store(true);
  small_->post({});   // close the listener
  const int64_t until = now_ns() + int64_t(timeout_seconds * 1e9);
  int quiet = 0;      // consecutive looks with nothing in flight: requests on their way are let in
  while (now_ns() < until) {
    quiet = shared_.inflight.load() ? 0 : quiet + 1;
    if (quiet > 10) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return shared_.inflight.load() == 0;
}

void Server::stop() {
  shared_.draining.store(true);
  // In the order in which they feed each other; only when none runs any more may the first go.
  if (small_) small_->stop();
  for (auto& b : bulk_) b->stop();
  for (auto& r : records_) r->stop();
  if (reads_) reads_->stop();
  if (verbs_) verbs_->close();
  small_.reset();
  bulk_.clear();
  records_.clear();
  reads_.reset();
}

namespace {

nb::dict stats_of(Server& server) {
  const ServerStats& s = server.shared().stats;
  nb::dict d = front_stats(server.shared(), {Op::HELLO, Op::DISCOVER, Op::PROMISE, Op::WITHDRAW, Op::WHY, Op::ADMIT, Op::SUSPECT, Op::READ, Op::WRITE});
  d["disk_read_seconds"] = histogram(s.disk_read_seconds);
  d["read_items"] = counters(s.read_items, STATUSES);
  const std::pair<const char*, const Counter*> singles[] = {
      {"read_head_bytes", &s.read_head_bytes}, {"reads_direct", &s.reads_direct}, {"reads_direct_bytes", &s.reads_direct_bytes},
      {"reads_cached", &s.reads_cached}, {"reads_fell_back", &s.reads_fell_back}};
  for (auto& [name, c] : singles) d[name] = c->load(std::memory_order_relaxed);
  d["read_head_bytes_max"] = server.shared().config.read_head_bytes_max;
  d["verbs_opened"] = s.verbs_opened.load(std::memory_order_relaxed);
  d["verbs_refused"] = s.verbs_refused.load(std::memory_order_relaxed);
  d["verbs_failed"] = s.verbs_failed.load(std::memory_order_relaxed);
  d["verbs_bytes"] = s.verbs_bytes.load(std::memory_order_relaxed);
  const VerbsServer* verbs = server.shared().verbs;
  d["verbs_queue_pairs"] = verbs ? verbs->device->queue_pairs.load() : 0;
  d["verbs_registered_bytes"] = verbs ? verbs->device->registered_bytes.load() : 0;
  d["write_arena_used_bytes"] = server.shared().arena.used_bytes();
  return d;
}

}  // namespace
}  // namespace kv

void bind_server(nb::module_& m) {
  using namespace kv;
  nb::class_<Server>(m, "Server")
      .def(
          "__init__",
          [](Server* self, Store& store, const std::string& host, uint16_t port, nb::bytes cluster16, uint64_t epoch, uint32_t bucket_seconds,
             const std::string& io, uint32_t bulk_threads, uint32_t write_threads, uint32_t connections_max, uint64_t write_arena_bytes,
             uint64_t read_head_bytes_max, uint64_t read_arena_bytes, uint64_t read_cache_bytes,
             uint32_t read_depth, double idle_timeout_seconds, double progress_timeout_seconds, const std::string& congestion_control,
             const std::string& rdma_device, uint64_t rdma_pool_bytes, uint32_t rdma_pairs_max, uint8_t rdma_traffic_class, int rdma_gid_index) {
            ServerConfig c;
            if (cluster16.size() != c.cluster.size()) throw nb::value_error("cluster16: 16 bytes needed");
            if (io != "auto" && io != "buffered" && io != "direct") throw nb::value_error("io: auto, buffered or direct");
            if (!bulk_threads || !write_threads || !connections_max || !read_depth || bulk_threads > 64 || write_threads > 64 || read_depth > 256)
              throw nb::value_error("threads, connections and depth: 1 or more (threads at most 64, depth 256)");
            if (!(progress_timeout_seconds > 0 && progress_timeout_seconds < 1e6 && idle_timeout_seconds > 0 && idle_timeout_seconds < 1e6))
              throw nb::value_error("timeouts: above 0 and below 1e6 s");
            c.host = host;
            c.port = port;
            std::memcpy(c.cluster.data(), cluster16.c_str(), c.cluster.size());
            c.epoch = epoch;
            c.bucket_seconds = bucket_seconds;
            c.io = io;
            c.bulk_threads = bulk_threads;
            c.write_threads = write_threads;
            c.connections_max = connections_max;
            c.write_arena_bytes = write_arena_bytes;
            c.read_head_bytes_max = read_head_bytes_max;
            c.read_arena_bytes = read_arena_bytes;
            c.read_cache_bytes = read_cache_bytes;
            c.read_depth = read_depth;
            c.idle_ms = uint32_t(idle_timeout_seconds * 1000);
            c.congestion_control = congestion_control;
            c.progress_ms = uint32_t(progress_timeout_seconds * 1000);
            c.rdma_device = rdma_device;
            c.rdma_pool_bytes = rdma_pool_bytes;
            c.rdma_pairs_max = rdma_pairs_max;
            c.rdma_route = {rdma_traffic_class, rdma_gid_index};
            try {
              nb::gil_scoped_release unlocked;
              new (self) Server(store, c);
            } catch (const std::system_error& e) {
              errno = e.code().value();
              PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.what());
              throw nb::python_error();
            } catch (const verbs::Fault& f) {
              nb::object type = nb::module_::import_("kvstore.errors").attr("ConfigError");
              PyErr_SetObject(type.ptr(), nb::object(type(f.code, f.place, f.cause, f.fix)).ptr());
              throw nb::python_error();
            }
          },
          nb::arg("store"), nb::arg("host"), nb::arg("port"), nb::kw_only(), nb::arg("cluster16"), nb::arg("epoch"),
          nb::arg("bucket_seconds") = 60, nb::arg("io") = "buffered", nb::arg("bulk_threads") = 2, nb::arg("write_threads") = 4,
          nb::arg("connections_max") = 4096, nb::arg("write_arena_bytes") = 96ull << 20,
          nb::arg("read_head_bytes_max") = 64ull << 20, nb::arg("read_arena_bytes") = 32ull << 20, nb::arg("read_cache_bytes") = 64ull << 20,
          nb::arg("read_depth") = 8, nb::arg("idle_timeout_seconds") = 300.0, nb::arg("progress_timeout_seconds") = 3.0,
          nb::arg("congestion_control") = "", nb::arg("rdma_device") = "off", nb::arg("rdma_pool_bytes") = 16ull << 20,
          nb::arg("rdma_pairs_max") = 1024, nb::arg("rdma_traffic_class") = 0, nb::arg("rdma_gid_index") = verbs::ANY_GID, nb::keep_alive<1, 2>())
      .def_prop_ro("port", &Server::port)
      .def_prop_ro("boot_id", &Server::boot_id)
      .def_prop_ro("io", [](Server& s) { return s.io(); })
      .def_prop_ro("io_note", [](Server& s) { return s.io_note(); })
      .def_prop_ro("rdma", [](Server& s) { return s.rdma(); })
      .def_prop_ro("rdma_note", [](Server& s) { return s.rdma_note(); })
      .def("set_epoch", &Server::set_epoch, nb::arg("epoch"))
      .def("drain", &Server::drain, nb::arg("timeout_seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Server::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", &stats_of);
}
