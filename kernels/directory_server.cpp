// A window directory on its port: one thread that accepts, and answers every verb inline. Its face in Python.
#include <errno.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <system_error>

#include "directory.hpp"
#include "server_bind.hpp"
#include "server_front.hpp"

namespace nb = nanobind;

namespace kv {
namespace {

class DirectoryLoop final : public FrontLoop {
 public:
  DirectoryLoop(FrontShared& shared, directory::Directory& directory, int listener) : FrontLoop(shared, listener), directory_(directory) {}
  ~DirectoryLoop() override { stop(); }

 protected:
  bool serves(wire::Role role) const override { return role == wire::Role::DIRECTORY; }
  Status answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) override {
    reply_.clear();
    const Status status = directory_.answer(wire::Verb(header.verb), body, header.body_bytes, conn.agent, reply_);
    if (status == Status::OK) append_reply(conn, header, reply_);
    return status;
  }
  void on_closed(Conn& conn) override { directory_.closed(conn.agent); }
  void on_tick(int64_t now) override {
    FrontLoop::on_tick(now);
    directory_.tick();
    if (directory_.table.stats.entries.load(std::memory_order_relaxed)) hurried_ = true;   // what expires is swept with nobody connected, too
    else if (!connections()) hurried_ = false;
  }

 private:
  directory::Directory& directory_;
  std::vector<uint8_t> reply_;
};

class DirectoryServer {
 public:
  DirectoryServer(const FrontConfig& front, const directory::Config& config) : shared_(front), directory_(config), port_(front.port) {
    shared_.boot_id = random_boot_id();
    const int listener = listen_on(front.host, port_, front.congestion_control);
    try {
      loop_ = std::make_unique<DirectoryLoop>(shared_, directory_, listener);
    } catch (...) {
      ::close(listener);
      throw;
    }
    loop_->start("kv-directory");
  }
  ~DirectoryServer() { stop(); }

  uint16_t port() const { return port_; }
  uint64_t boot_id() const { return shared_.boot_id; }
  // Closes the port, answers DRAINING from now on; what was asked before has been answered when it returns.
  void stop() {
    if (!loop_) return;
    shared_.draining.store(true);
    loop_->stop();
    loop_.reset();
  }
  nb::dict stats() const {
    nb::dict d = front_stats(shared_, {Op::HELLO, Op::REGISTER, Op::LOCATE, Op::TOUCH, Op::FORGET, Op::REPORT, Op::STATUS});
    const wire::DirectoryStatus s = directory_.status();
    const std::pair<const char*, uint64_t> singles[] = {
        {"entries", s.entries}, {"agents", s.agents}, {"memory_bytes", s.memory_bytes}, {"memory_max_bytes", s.memory_max_bytes},
        {"lifetime_ms", s.lifetime_ms}, {"uptime_ms", s.uptime_ms}, {"keys_registered", s.keys_registered}, {"keys_located", s.keys_located},
        {"keys_found", s.keys_found}, {"keys_touched", s.keys_touched}, {"keys_forgotten", s.keys_forgotten}, {"expired", s.expired},
        {"evicted", s.evicted}, {"displaced", s.displaced}, {"keys_refused", directory_.stats.keys_refused.load()},
        {"agents_connected", directory_.agents.connected.load()}, {"agents_hidden", directory_.agents.hidden.load()},
        {"reports", directory_.agents.reports.load()}, {"superseded", directory_.agents.superseded.load()}};
    for (auto& [name, value] : singles) d[name] = value;
    return d;
  }

 private:
  FrontShared shared_;
  directory::Directory directory_;
  uint16_t port_;
  std::unique_ptr<DirectoryLoop> loop_;
};

}  // namespace
}  // namespace kv

void bind_directory(nb::module_& m) {
  using namespace kv;
  nb::class_<DirectoryServer>(m, "DirectoryServer")
      .def(
          "__init__",
          [](DirectoryServer* self, const std::string& host, uint16_t port, nb::bytes cluster16, uint64_t memory_bytes, double lifetime_seconds,
             bool virtual_clock, uint32_t connections_max, double idle_timeout_seconds, double progress_timeout_seconds,
             const std::string& congestion_control) {
            FrontConfig f;
            directory::Config c;
            if (cluster16.size() != f.cluster.size()) throw nb::value_error("cluster16: 16 bytes needed");
            if (!connections_max || memory_bytes < (2u << 20)) throw nb::value_error("connections and memory: 1 or more, 2 MiB or more");
            if (!(progress_timeout_seconds > 0 && progress_timeout_seconds < 1e6 && idle_timeout_seconds > 0 && idle_timeout_seconds < 1e6 &&
                  lifetime_seconds >= 1 && lifetime_seconds <= 86400))
              throw nb::value_error("timeouts: above 0 and below 1e6 s; lifetime: 1 s to a day");
            f.host = host;
            f.port = port;
            std::memcpy(f.cluster.data(), cluster16.c_str(), f.cluster.size());
            f.connections_max = connections_max;
            f.idle_ms = uint32_t(idle_timeout_seconds * 1000);
            f.progress_ms = uint32_t(progress_timeout_seconds * 1000);
            f.congestion_control = congestion_control;
            c.memory_bytes = memory_bytes;
            c.lifetime_ms = uint32_t(lifetime_seconds * 1000);
            c.virtual_clock = virtual_clock;
            try {
              nb::gil_scoped_release unlocked;
              new (self) DirectoryServer(f, c);
            } catch (const std::system_error& e) {
              errno = e.code().value();
              PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.what());
              throw nb::python_error();
            }
          },
          nb::arg("host"), nb::arg("port"), nb::kw_only(), nb::arg("cluster16"), nb::arg("memory_bytes") = 1'000'000'000ull,
          nb::arg("lifetime_seconds") = 180.0, nb::arg("virtual_clock") = false, nb::arg("connections_max") = 4096,
          nb::arg("idle_timeout_seconds") = 300.0, nb::arg("progress_timeout_seconds") = 3.0, nb::arg("congestion_control") = "")
      .def_prop_ro("port", &DirectoryServer::port)
      .def_prop_ro("boot_id", &DirectoryServer::boot_id)
      .def("stop", &DirectoryServer::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", &DirectoryServer::stats);
}
