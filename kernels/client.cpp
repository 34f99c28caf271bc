// ClientCore: the client's native face. What moves bytes or answers many messages is here and below; decisions are Python's.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <list>

#include "bind.hpp"
#include "client_load.hpp"
#include "client_small.hpp"
#include "client_store.hpp"
#include "verbs.hpp"

namespace kv::client {
namespace {

using namespace nb::literals;
using Ints1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words1 = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words2 = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Longs1 = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t nanoseconds(double seconds) { return seconds >= 3600 ? 3600 * SECOND : seconds <= 0 ? 0 : int64_t(seconds * 1e9); }

void need(bool fine, const char* what) {
  if (!fine) throw std::invalid_argument(what);
}

template <size_t N>
std::array<uint8_t, N> bytes_of(const nb::bytes& from, const char* what) {
  need(from.size() == N, what);
  std::array<uint8_t, N> out;
  std::memcpy(out.data(), from.c_str(), N);
  return out;
}

template <class T>
nb::object rows_of(std::vector<T>&& from) {   // as bytes: Python has a dtype for them
  auto* kept = new std::vector<T>(std::move(from));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(reinterpret_cast<uint8_t*>(kept->data()), {kept->size() * sizeof(T)}, owner));
}

struct Discover { std::shared_ptr<DiscoverCall> call; };
struct Promise { std::shared_ptr<PromiseCall> call; };

// Ends its load when Python lets go of it, so that a forgotten load never writes into freed memory.
struct Load {
  std::shared_ptr<LoadJob> job;
  RowsOut memory;   // the destination: let go of once the load has ended, in whatever order Python drops its side
  pid_t pid = getpid();
  ~Load() {
    if (getpid() != pid) new std::shared_ptr<LoadJob>(std::move(job));   // a forked child has none of the threads that would let go
    else if (job) job->end();
  }
};

class ClientCore {
 public:
  ClientCore(const std::vector<std::string>& addresses, const NetConfig& config, const StoreConfig& store, uint32_t k, uint32_t m)
      : net(std::make_shared<Net>(config, addresses)),
        shared(std::make_shared<LoadShared>(net, k, m)),
        writer(std::make_shared<Writer>(shared, store)),
        pid_(getpid()) {
    writer->start();
  }
  ~ClientCore() {
    if (getpid() == pid_) {
      close();
      return;
    }
    // A forked child has none of the threads: nothing here can be joined, and nothing is.
    new std::shared_ptr<Writer>(std::move(writer));
    new std::shared_ptr<LoadShared>(std::move(shared));
    new std::shared_ptr<Net>(std::move(net));
    new std::list<std::weak_ptr<LoadJob>>(std::move(loads_));
  }

  // Raises Closed, and after a fork MisuseError. With the GIL.
  void check() const {
    if (getpid() != pid_) raise_fault("MisuseError", "E561", "client", "used in a forked process");
    if (closed_.load()) raise_fault("Closed", "E560", "client", "is closed");
  }

  void close() {
    if (closed_.exchange(true)) return;
    writer->stop();
    std::list<std::weak_ptr<LoadJob>> loads;
    {
      std::lock_guard lock(mutex_);
      loads.swap(loads_);
    }
    for (auto& weak : loads)
      if (auto job = weak.lock()) job->end();
    net->stop();
    writer->abandon();
  }

  std::shared_ptr<LoadJob> load(LoadPlan plan) {
    auto job = std::make_shared<LoadJob>(shared, std::move(plan));
    {
      std::lock_guard lock(mutex_);
      std::erase_if(loads_, [](const auto& weak) { return weak.expired(); });
      loads_.push_back(job);
    }
    job->start();
    if (closed_.load()) job->end();   // closed meanwhile: it may have missed this load
    return job;
  }

  std::shared_ptr<Net> net;
  std::shared_ptr<LoadShared> shared;
  std::shared_ptr<Writer> writer;

 private:
  const pid_t pid_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::list<std::weak_ptr<LoadJob>> loads_;
};

std::vector<PlaneSpec> planes_of(const Words2& planes, uint64_t block_bytes, uint32_t k) {
  need(planes.shape(1) == 3 && planes.shape(0) >= 1 && planes.shape(0) <= PLANES_MAX, "planes: (1 to 255, 3)");
  std::vector<PlaneSpec> out;
  for (size_t p = 0; p < planes.shape(0); p++) {
    const PlaneSpec plane{planes(p, 0), planes(p, 1), planes(p, 2)};
    need(plane.bytes > 0 && uint64_t(plane.offset) + plane.bytes <= block_bytes && plane.shard_bytes == shard_bytes_of(plane.bytes, k),
         "planes: outside the block, or shards of another size");
    out.push_back(plane);
  }
  return out;
}

void fill_nodes(const Ints2& nodes, size_t row, uint32_t shards, int32_t (&to)[SHARDS_MAX]) {
  for (uint32_t s = 0; s < SHARDS_MAX; s++) to[s] = s < shards ? nodes(row, s) : -1;
}

nb::object load(ClientCore& core, const nb::bytes& owner, uint64_t epoch, const Bytes2& names, const Words2& spans, const Ints2& nodes,
                const Longs1& doubtful, const Words2& planes, const Bytes2& block_keys, const RowsOut& destination, bool eager, bool by_plane) {
  core.check();
  const uint32_t k = core.shared->codec.k(), shards = k + core.shared->codec.m();
  const size_t extents = names.shape(0);
  need(names.shape(1) == sizeof(wire::WritingName) && spans.shape(0) == extents && spans.shape(1) == 3 && nodes.shape(0) == extents &&
           nodes.shape(1) == shards && doubtful.shape(0) == extents && block_keys.shape(1) == KEY_BYTES,
       "load: shapes do not fit");
  need(rows_are_dense(destination) && destination.shape(0) >= block_keys.shape(0), "load: destination has too few rows, or rows that overlap");
  LoadPlan plan;
  plan.owner = bytes_of<OWNER_BYTES>(owner, "owner: 16 bytes");
  plan.epoch = epoch;
  plan.planes = planes_of(planes, destination.shape(1), k);
  plan.block_keys.assign(block_keys.data(), block_keys.data() + block_keys.size());
  plan.base = destination.data();
  plan.row_stride = destination.shape(0) > 1 ? size_t(destination.stride(0)) : destination.shape(1);
  plan.eager = eager;
  plan.by_plane = by_plane;
  uint32_t row = 0;
  for (size_t e = 0; e < extents; e++) {
    ExtentPlan x{};
    std::memcpy(&x.name, names.data() + e * sizeof x.name, sizeof x.name);
    x.first_block = spans(e, 0);
    x.count = spans(e, 1);
    x.row = spans(e, 2);
    need(x.row == row && x.count >= 1 && uint64_t(x.first_block) + x.count <= BLOCKS_PER_EXTENT_MAX, "load: extents are not one after the other");
    row += x.count;
    fill_nodes(nodes, e, shards, x.nodes);
    x.doubtful = doubtful(e);
    plan.extents.push_back(x);
  }
  need(row == block_keys.shape(0), "load: one key for each row");
  plan.rows = row;
  std::shared_ptr<LoadJob> job;
  {
    nb::gil_scoped_release release;
    job = core.load(std::move(plan));
  }
  return nb::cast(new Load{std::move(job), destination}, nb::rv_policy::take_ownership);
}

uint64_t store(ClientCore& core, const nb::bytes& owner, uint64_t write_epoch, const Longs1& write_ids, const Words2& spans, const Ints2& nodes,
               const Words2& planes, const Bytes2& block_keys, const Rows& blocks, const Words1& earlier, const nb::dict& fields) {
  core.check();
  const uint32_t k = core.shared->codec.k(), shards = k + core.shared->codec.m();
  const size_t extents = write_ids.shape(0);
  need(spans.shape(0) == extents && spans.shape(1) == 3 && nodes.shape(0) == extents && nodes.shape(1) == shards &&
           block_keys.shape(1) == KEY_BYTES && block_keys.shape(0) == blocks.shape(0),
       "store: shapes do not fit");
  need(rows_are_dense(blocks), "store: rows overlap");
  StorePlan plan;
  plan.owner = bytes_of<OWNER_BYTES>(owner, "owner: 16 bytes");
  plan.write_epoch = write_epoch;
  plan.planes = planes_of(planes, blocks.shape(1), k);
  plan.block_keys.assign(block_keys.data(), block_keys.data() + block_keys.size());
  plan.earlier.assign(earlier.data(), earlier.data() + earlier.size());
  plan.base = blocks.data();
  plan.row_stride = blocks.shape(0) > 1 ? size_t(blocks.stride(0)) : blocks.shape(1);
  plan.block_bytes = uint32_t(blocks.shape(1));
  plan.layout_tag = nb::cast<uint64_t>(fields["layout_tag"]);
  plan.bucket = nb::cast<uint32_t>(fields["bucket"]);
  plan.kv_group = nb::cast<uint32_t>(fields["kv_group"]);
  plan.depth = nb::cast<uint16_t>(fields["depth"]);
  plan.retention_class = nb::cast<uint8_t>(fields["retention_class"]);
  plan.fidelity = nb::cast<uint8_t>(fields["fidelity"]);
  uint32_t row = 0;
  for (size_t e = 0; e < extents; e++) {
    StoreExtentPlan x{};
    x.write_id = write_ids(e);
    x.start_block = spans(e, 0);
    x.count = spans(e, 1);
    x.pg = spans(e, 2);
    x.row = row;
    need(x.count >= 1 && x.count <= BLOCKS_PER_EXTENT_MAX, "store: an extent has 1 to 64 blocks");
    row += x.count;
    fill_nodes(nodes, e, shards, x.nodes);
    plan.extents.push_back(x);
  }
  need(row == blocks.shape(0), "store: the extents are not the rows");
  nb::gil_scoped_release release;
  return core.writer->add(std::move(plan));
}

nb::dict stats(ClientCore& core) {
  nb::dict out;
  const NetStats& n = core.net->stats;
  const LoadStats& l = core.shared->totals;
  const StoreStats& s = core.writer->stats;
  auto set = [&out](const char* name, auto value) { out[name] = value; };
  set("connects", n.connects.load());
  set("connect_failures", n.connect_failures.load());
  set("connections_broken", n.connections_broken.load());
  set("connections_stalled", n.connections_stalled.load());
  set("connections", n.connections.load());
  set("protocol_errors", n.protocol_errors.load());
  set("bytes_received", n.bytes_received.load());
  set("bytes_sent", n.bytes_sent.load());
  set("read_bytes_tcp", n.read_bytes_tcp.load());
  set("read_bytes_rdma", n.read_bytes_rdma.load());
  set("rdma_fallbacks", n.rdma_fallbacks.load());
  set("rdma_faults", n.rdma_faults.load());
  const auto* zones = core.net->zones.get();
  set("rdma_queue_pairs", zones ? zones->device->queue_pairs.load() : 0);
  set("rdma_registered_bytes", zones ? zones->device->registered_bytes.load() : 0);
  set("rdma_lost_bytes", zones ? zones->device->lost_bytes.load() : 0);
  set("shards_asked", l.shards_asked.load());
  set("parity_shards_asked", l.parity_asked.load());
  set("late_asked", l.late_asked.load());
  set("late_asked_after_errors", l.late_asked_errors.load());
  set("decodes", l.decodes.load());
  set("decoded_pieces", l.decoded_pieces.load());
  set("degraded_extents", l.extents_degraded.load());
  set("bad_shards", l.bad_shards.load());
  set("missing_shards", l.missing_shards.load());
  set("failed_shards", l.failed_shards.load());
  set("lagging_shards", l.lagging_shards.load());
  set("extents_failed", l.extents_failed.load());
  set("digest_mismatches", l.digest_mismatches.load());
  set("parity_received", l.parity_received.load());
  set("extents_stored", s.extents_stored.load());
  set("extents_degraded", s.extents_degraded.load());
  set("extents_store_failed", s.extents_failed.load());
  set("extents_dropped", s.extents_dropped.load());
  set("bytes_stored", s.bytes_stored.load());
  set("bytes_dropped", s.bytes_dropped.load());
  set("bytes_failed", s.bytes_failed.load());
  set("bytes_busy", s.bytes_busy.load());
  set("shards_acknowledged", s.shards_acknowledged.load());
  set("shards_refused", s.shards_failed.load());
  set("shards_no_space", s.shards_no_space.load());
  set("shards_busy", s.shards_busy.load());
  set("shards_stale_map", s.shards_stale_map.load());
  set("shards_draining", s.shards_draining.load());
  set("shards_unreachable", s.shards_unreachable.load());
  set("shards_aside", s.shards_aside.load());
  set("shards_given_up", s.shards_given_up.load());
  set("withdrawals", s.withdrawals.load());
  set("queued_bytes", s.queued_bytes.load());
  set("flight_bytes", s.flight_bytes.load());
  set("scratch_bytes", core.shared->scratch.held_bytes());
  set("discover_delay_seconds", double(core.net->discover_delay.delay()) / 1e9);
  set("promise_delay_seconds", double(core.net->promise_delay.delay()) / 1e9);
  set("load_delay_seconds", double(core.shared->delay.delay()) / 1e9);
  const int64_t now = now_ns();
  uint32_t connected = 0, down = 0, late = 0, well = 0;
  for (auto& node : core.net->nodes) {
    well += node->health(now) == 0;
    down += node->down(now);
    late += node->late();
    std::lock_guard lock(node->mutex);
    connected += (node->small && node->small->state() == Conn::State::OPEN) || (node->write && node->write->state() == Conn::State::OPEN) ||
                 !node->idle.empty();
  }
  set("connected_nodes", connected);
  set("nodes_known", core.net->nodes.size());
  set("nodes_well", well);
  set("nodes_down", down);
  set("nodes_late", late);
  return out;
}

nb::list call_many(ClientCore& core, const std::vector<std::tuple<uint32_t, uint8_t, nb::bytes>>& requests, double timeout_seconds, uint32_t enough) {
  core.check();
  std::vector<std::tuple<uint32_t, wire::Verb, std::vector<uint8_t>>> copies;
  for (auto& [node, verb, body] : requests) {
    const auto* at = reinterpret_cast<const uint8_t*>(body.c_str());
    copies.emplace_back(node, wire::Verb(verb), std::vector<uint8_t>(at, at + body.size()));
  }
  std::vector<RpcCall::Answer> answers;
  {
    nb::gil_scoped_release release;
    auto call = std::make_shared<RpcCall>(core.net, enough);
    for (auto& [node, verb, body] : copies) call->ask(node, verb, body);
    call->wait(nanoseconds(timeout_seconds));
    answers = call->answers();
  }
  nb::list out;
  for (auto& a : answers)
    out.append(nb::make_tuple(a.there ? int64_t(a.result) : int64_t(-1), nb::bytes(reinterpret_cast<const char*>(a.body.data()), a.body.size())));
  return out;
}

}  // namespace
}  // namespace kv::client

void bind_client(nanobind::module_& m) {
  using namespace kv;
  using namespace kv::client;
  m.attr("FOUND_BYTES") = sizeof(Found);
  m.attr("PIECE_BYTES") = sizeof(Piece);
  m.attr("BAD_SHARD_BYTES") = sizeof(BadShard);

  nb::class_<Readable>(m, "ClientReadable")
      .def(
          "__init__",
          [](Readable* self, uint64_t layout_tag, uint32_t block_bytes, uint8_t plane_count, uint8_t k, uint8_t m, uint32_t kv_group) {
            new (self) Readable{layout_tag, block_bytes, kv_group, plane_count, k, m};
          },
          "layout_tag"_a, "block_bytes"_a, "plane_count"_a, "k"_a, "m"_a, "kv_group"_a)
      .def_ro("layout_tag", &Readable::layout_tag)
      .def_ro("k", &Readable::k);

  nb::class_<Discover>(m, "ClientDiscover")
      .def(
          "ask",
          [](Discover& d, const Ints1& indices, const Ints1& nodes, bool counted) {
            need(indices.shape(0) == nodes.shape(0), "ask: one node for each key");
            nb::gil_scoped_release release;
            d.call->ask(indices.data(), nodes.data(), uint32_t(indices.shape(0)), counted);
          },
          "indices"_a, "nodes"_a, "counted"_a)
      .def("wait", [](Discover& d, double s) { return d.call->wait(nanoseconds(s)); }, "timeout_seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("found", [](Discover& d) { return rows_of(d.call->found()); })
      .def("earlier", [](Discover& d) { return array_of(d.call->earlier()); })
      .def("starts", [](Discover& d) { return array_of(d.call->starts()); })
      .def(
          "walk",
          [](Discover& d, uint32_t rows, const Longs1& epochs, const Words1& refused) {
            auto walk = d.call->walk(rows, {epochs.data(), epochs.size()}, {refused.data(), refused.size()});
            return nb::make_tuple(rows_of(std::move(walk.pieces)), array_of(std::move(walk.starts)));
          },
          "rows"_a, "epochs"_a.noconvert(), "refused"_a.noconvert())
      .def(
          "names", [](Discover& d, const Words1& rows) { return rows_of(d.call->names({rows.data(), rows.size()})); }, "rows"_a.noconvert())
      .def(
          "extents",
          [](Discover& d, const Bytes1& pieces, const Longs1& absent) {
            need(pieces.size() == absent.size() * sizeof(Piece), "extents: one mask for each piece");
            std::vector<Piece> copied(absent.size());
            std::memcpy(copied.data(), pieces.data(), pieces.size());
            return rows_of(d.call->extents(copied, {absent.data(), absent.size()}));
          },
          "pieces"_a.noconvert(), "absent"_a.noconvert())
      .def("answers", [](Discover& d) { return array_of(d.call->answers()); })
      .def("take_failed", [](Discover& d) { return array_of(d.call->take_failed()); })
      .def("unsettled", [](Discover& d) { return array_of(d.call->unsettled()); })
      .def("owing", [](Discover& d, double s) { return array_of(d.call->owing(nanoseconds(s))); }, "age_seconds"_a)
      .def("pending", [](Discover& d) { return d.call->pending(); });

  m.def(
      "cover",
      [](const Words2& candidates) {
        need(candidates.shape(1) == 3, "candidates: (n, 3), start, end, row");
        std::vector<Candidate> copied(candidates.shape(0));
        std::memcpy(copied.data(), candidates.data(), candidates.nbytes());
        return rows_of(cover(std::move(copied)));
      },
      "candidates"_a.noconvert());

  nb::class_<Promise>(m, "ClientPromise")
      .def("wait", [](Promise& p, double s) { return p.call->wait(nanoseconds(s)); }, "timeout_seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("masks", [](Promise& p) { return array_of(p.call->masks()); })
      .def("answered", [](Promise& p) { return array_of(p.call->answered()); })
      .def("last_buckets", [](Promise& p) { return array_of(p.call->last_buckets()); })
      .def("owing", [](Promise& p, double s) { return array_of(p.call->owing(nanoseconds(s))); }, "age_seconds"_a)
      .def("pending", [](Promise& p) { return p.call->pending(); });

  nb::class_<Load>(m, "ClientLoad")
      .def("wait_plane", [](Load& l, uint32_t plane, double s) { return l.job->wait_plane(plane, nanoseconds(s)); }, "plane"_a, "timeout_seconds"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("wait_all", [](Load& l, double s) { return l.job->wait_all(nanoseconds(s)); }, "timeout_seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("rows_of_plane", [](Load& l, uint32_t plane) { return l.job->rows_of_plane(plane); }, "plane"_a)
      .def("rows", [](Load& l) { return l.job->rows(); })
      .def("times", [](Load& l) {
        const auto rows = l.job->times();
        std::vector<int64_t> flat;
        for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
        return array_of(std::move(flat));
      })
      .def("end", [](Load& l) { l.job->end(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("cancel", [](Load& l) { l.job->cancel(); })
      .def("stats", [](Load& l) {
        nb::dict out;
        const LoadStats& s = l.job->stats;
        out["shards_asked"] = s.shards_asked.load();
        out["late_asked"] = s.late_asked.load();
        out["decodes"] = s.decodes.load();
        out["bad_shards"] = s.bad_shards.load();
        out["missing_shards"] = s.missing_shards.load();
        out["failed_shards"] = s.failed_shards.load();
        out["lagging_shards"] = s.lagging_shards.load();
        out["extents_failed"] = s.extents_failed.load();
        out["digest_mismatches"] = s.digest_mismatches.load();
        out["parity_received"] = s.parity_received.load();
        return out;
      });

  nb::class_<ClientCore>(m, "ClientCore")
      .def(
          "__init__",
          [](ClientCore* self, const std::vector<std::string>& addresses, const nb::bytes& cluster, uint64_t epoch, uint32_t k, uint32_t m,
             uint32_t threads, uint32_t bulk_connections_max, uint64_t queue_bytes_max, double connect_timeout_seconds, double stall_timeout_seconds,
             double drain_timeout_seconds, double plane_wait_seconds, double idle_timeout_seconds, double store_deadline_seconds, const std::string& congestion_control, bool directories,
             const std::string& transport, const std::string& rdma_device, uint64_t rdma_zone_bytes, uint64_t rdma_pool_bytes, bool rdma_windows,
             uint8_t rdma_traffic_class, int rdma_gid_index) {
            need(transport == "tcp" || transport == "auto" || transport == "rdma", "transport: tcp, auto or rdma");
            need(threads >= 1 && threads <= 64, "threads: 1 to 64");
            need(!addresses.empty(), "addresses: at least one");
            NetConfig net;
            net.cluster = bytes_of<16>(cluster, "cluster: 16 bytes");
            net.epoch = epoch;
            net.loops = threads;
            net.bulk_connections_max = bulk_connections_max;
            net.connect_timeout_ns = nanoseconds(connect_timeout_seconds);
            net.stall_timeout_ns = nanoseconds(stall_timeout_seconds);
            net.drain_timeout_ns = nanoseconds(drain_timeout_seconds);
            net.plane_wait_ns = nanoseconds(plane_wait_seconds);
            net.congestion_control = congestion_control;
            if (directories) net.small_role = wire::Role::DIRECTORY;
            net.idle_timeout_ns = nanoseconds(idle_timeout_seconds);
            net.transport = transport == "rdma" ? Transport::RDMA : transport == "auto" ? Transport::AUTO : Transport::TCP;
            net.rdma_device = rdma_device;
            net.rdma_zone_bytes = rdma_zone_bytes;
            net.rdma_pool_bytes = rdma_pool_bytes;
            net.rdma_windows = rdma_windows;
            net.rdma_route = {rdma_traffic_class, rdma_gid_index};
            StoreConfig store;
            store.queue_bytes_max = queue_bytes_max;
            store.deadline_ns = nanoseconds(store_deadline_seconds);
            try {
              nb::gil_scoped_release unlocked;   // registering memory takes time
              new (self) ClientCore(addresses, net, store, k, m);
            } catch (const verbs::Fault& fault) {
              raise_fault("ConfigError", fault.code, fault.place, fault.cause, fault.fix);
            }
          },
          "addresses"_a, "cluster"_a, "epoch"_a, "k"_a, "m"_a, "threads"_a = 2, "bulk_connections_max"_a = 2048, "queue_bytes_max"_a = uint64_t(1) << 30,
          "connect_timeout_seconds"_a = 1.0, "stall_timeout_seconds"_a = 3.0, "drain_timeout_seconds"_a = 1.0, "plane_wait_seconds"_a = 0.002, "idle_timeout_seconds"_a = 60.0,
          "store_deadline_seconds"_a = 10.0, "congestion_control"_a = "", "directories"_a = false,
          "transport"_a = "tcp", "rdma_device"_a = "auto", "rdma_zone_bytes"_a = uint64_t(4) << 20, "rdma_pool_bytes"_a = uint64_t(256) << 20,
          "rdma_windows"_a = true, "rdma_traffic_class"_a = 0, "rdma_gid_index"_a = verbs::ANY_GID)
      .def(
          "discover",
          [](ClientCore& core, const nb::bytes& owner, uint64_t epoch, const Bytes2& keys, const Readable& readable) {
            core.check();
            need(keys.shape(1) == KEY_BYTES, "keys: (n, 32)");
            return new Discover{std::make_shared<DiscoverCall>(core.net, bytes_of<OWNER_BYTES>(owner, "owner: 16 bytes"), epoch, keys.data(),
                                                               uint32_t(keys.shape(0)), readable)};
          },
          "owner"_a, "epoch"_a, "keys"_a, "readable"_a, nb::rv_policy::take_ownership)
      .def(
          "promise",
          [](ClientCore& core, const nb::bytes& owner, uint64_t epoch, uint32_t bucket, uint8_t flags, uint8_t retention_class, uint16_t pin_seconds,
             const Bytes2& names, const Ints2& nodes, uint32_t enough) {
            core.check();
            need(names.shape(1) == sizeof(wire::WritingName) && nodes.shape(0) == names.shape(0) && nodes.shape(1) <= SHARDS_MAX,
                 "promise: shapes do not fit");
            PromiseCall::Want want{};
            const auto o = bytes_of<OWNER_BYTES>(owner, "owner: 16 bytes");
            std::memcpy(want.head.owner, o.data(), OWNER_BYTES);
            want.head.epoch = epoch;
            want.head.bucket = bucket;
            want.head.flags = flags;
            want.head.retention_class = retention_class;
            want.head.pin_seconds = pin_seconds;
            want.names = names.data();
            want.nodes = nodes.data();
            want.count = uint32_t(names.shape(0));
            want.shards = uint32_t(nodes.shape(1));
            want.need = enough;
            auto call = std::make_shared<PromiseCall>(core.net, want);
            {
              nb::gil_scoped_release release;
              call->start();
            }
            return new Promise{std::move(call)};
          },
          "owner"_a, "epoch"_a, "bucket"_a, "flags"_a, "retention_class"_a, "pin_seconds"_a, "names"_a, "nodes"_a, "enough"_a,
          nb::rv_policy::take_ownership)
      .def("load", &load, "owner"_a, "epoch"_a, "names"_a, "spans"_a, "nodes"_a, "doubtful"_a, "planes"_a, "block_keys"_a,
           "destination"_a, "eager"_a, "by_plane"_a)
      .def("store", &store, "owner"_a, "write_epoch"_a, "write_ids"_a, "spans"_a, "nodes"_a, "planes"_a, "block_keys"_a, "blocks"_a, "earlier"_a,
           "fields"_a)
      .def(
          "wait_done",
          [](ClientCore& core, double timeout_seconds) {
            std::vector<Writer::Done> done;
            {
              nb::gil_scoped_release release;
              done = core.writer->wait_done(nanoseconds(timeout_seconds));
            }
            nb::list out;
            for (auto& d : done)
              out.append(nb::make_tuple(d.id, nb::bytes(reinterpret_cast<const char*>(d.outcomes.data()), d.outcomes.size()),
                                        nb::bytes(reinterpret_cast<const char*>(d.acks.data()), d.acks.size()), d.newer_epoch));
            return out;
          },
          "timeout_seconds"_a)
      .def_prop_ro("newest_epoch", [](ClientCore& core) { return core.net->newest_epoch.load(std::memory_order_relaxed); })
      .def("call_many", &call_many, "requests"_a, "timeout_seconds"_a, "enough"_a = 0)
      .def("retry_down", [](ClientCore& core) {
        for (auto& node : core.net->nodes) node->down_until_ns.store(0, std::memory_order_relaxed);
      })
      .def("mark_late", [](ClientCore& core, const Words1& nodes) {
        for (size_t i = 0; i < nodes.shape(0); i++)
          if (nodes(i) < core.net->nodes.size()) core.net->nodes[nodes(i)]->mark_late(now_ns());
      }, "nodes"_a)
      .def("health", [](ClientCore& core) {
        std::vector<uint8_t> out;
        const int64_t now = now_ns();
        for (auto& node : core.net->nodes) out.push_back(node->health(now));
        return array_of(std::move(out));
      })
      .def_prop_ro("discover_delay_seconds", [](ClientCore& core) { return double(core.net->discover_delay.delay()) / 1e9; })
      .def_prop_ro("promise_delay_seconds", [](ClientCore& core) { return double(core.net->promise_delay.delay()) / 1e9; })
      .def("stats", &stats)
      .def("take_bad_shards", [](ClientCore& core) { return rows_of(core.shared->bad.take()); })
      .def("take_notices", [](ClientCore& core) {
        nb::list out;
        for (const auto& notice : core.net->take_notices()) out.append(nb::make_tuple(notice.warn, notice.text));
        return out;
      })
      .def("close", &ClientCore::close, nb::call_guard<nb::gil_scoped_release>());
}
