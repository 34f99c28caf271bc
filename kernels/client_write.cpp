// WriteConn: one bulk connection per node, taking the shards of all stores in turn. See client_store.hpp.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "client_store.hpp"

namespace kv::client {

using wire::FrameHeader;

WriteConn::WriteConn(Net& n, Node& to, Writer& writer) : Conn(n, to, n.write_loop(to.index), wire::Role::BULK), writer_(writer.shared_from_this()) {}

std::shared_ptr<WriteConn> WriteConn::of(Net& net, Node& node, Writer& writer) {
  std::lock_guard lock(node.mutex);
  if (node.write && node.write->state() != State::CLOSED) return node.write;
  if (node.down(now_ns())) return nullptr;
  node.write = std::make_shared<WriteConn>(net, node, writer);
  return node.write;
}

void WriteConn::add(std::shared_ptr<WriteTask> task) {
  auto extent = task->extent;
  if (state() == State::CLOSED) {
    if (extent) {
      extent->on_result(*task, outcome(Fault::BROKEN));
      extent->on_released(*task);
    }
    return;
  }
  if (!extent || !task->refers) return;   // set aside or given up before it came here
  task->request_id = net.next_id();
  task->sent = 0;
  extent->name_request(*task);
  if (queue_.empty() && awaiting_.empty()) last_moved_ns_ = now_ns();
  queue_.push_back(std::move(task));
  if (state() == State::NEW) return open();
  if (state() == State::OPEN) send_more();
}

void WriteConn::send_more() {
  constexpr uint64_t STEP_BYTES = 1u << 20;
  constexpr uint32_t PARTS_MAX = 512;
  {
    std::lock_guard lock(mutex_);
    if (fd_ < 0) return;
    if (!out_.empty()) return listen_locked();   // HELLO first
  }
  bool broken = false;
  for (int turn = 0; turn < 4 && !queue_.empty(); turn++) {
    WriteTask& task = *queue_.front();
    iovec parts[PARTS_MAX];
    uint32_t n = 1;
    if (!task.aside.empty())
      parts[0] = {task.aside.data() + (task.sent - task.aside_at), size_t(task.bytes - task.sent)};
    else
      n = task.extent->parts(task, STEP_BYTES, parts, PARTS_MAX);
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = n;
    const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      broken = errno != EAGAIN;
      break;
    }
    last_moved_ns_ = now_ns();
    net.stats.bytes_sent.fetch_add(uint64_t(sent), std::memory_order_relaxed);
    task.sent += uint64_t(sent);
    if (task.sent < task.bytes) continue;
    auto whole = std::move(queue_.front());
    queue_.pop_front();
    if (!whole->aside.empty()) {
      aside_bytes_ -= whole->bytes - whole->aside_at;
      whole->aside = {};
    }
    auto extent = whole->extent;
    const bool busy_again = whole->tries < 3;
    awaiting_.push_back(whole);
    // A refusal for BUSY is tried again, so what was sent still refers to the caller's memory until it is answered.
    if (extent && !busy_again) extent->on_released(*whole);
  }
  if (broken) return close(outcome(Fault::BROKEN));
  std::lock_guard lock(mutex_);
  listen_locked();
}

void WriteConn::set_aside(const std::shared_ptr<WriteTask>& task) {
  auto extent = task->extent;
  if (!extent) return;
  auto waits = std::find(queue_.begin(), queue_.end(), task);
  if (waits == queue_.end()) {   // sent whole, or never to be
    extent->on_released(*task);
    return;
  }
  const uint64_t rest = task->bytes - task->sent;
  const bool started = task->sent > 0;
  if (aside_bytes_ + rest > writer_->config.aside_bytes_max) {
    writer_->stats.shards_given_up++;
    if (started) return close(outcome(Fault::CANCELLED));   // half a frame cannot be taken back
    queue_.erase(waits);
    extent->on_result(*task, outcome(Fault::CANCELLED));
    extent->on_released(*task);
    return;
  }
  std::vector<uint8_t> copy;
  copy.reserve(rest);
  const uint64_t from = task->sent;
  while (task->sent < task->bytes) {
    iovec parts[64];
    const uint32_t n = extent->parts(*task, rest, parts, 64);
    for (uint32_t i = 0; i < n; i++) {
      const auto* at = static_cast<const uint8_t*>(parts[i].iov_base);
      copy.insert(copy.end(), at, at + parts[i].iov_len);
      task->sent += parts[i].iov_len;
    }
  }
  task->sent = from;
  task->aside = std::move(copy);
  task->aside_at = from;
  aside_bytes_ += rest;
  writer_->stats.shards_aside++;
  task->extent = nullptr;   // nobody waits for the answer, and what was coded is free to go
  extent->on_released(*task);
}

void WriteConn::on_read() {
  for (;;) {
    const ssize_t n = receive(header_ + header_got_, sizeof header_ - header_got_);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return close(outcome(Fault::BROKEN));
    heard(now_ns());
    last_moved_ns_ = last_heard_ns_;
    header_got_ += uint32_t(n);
    if (header_got_ < sizeof header_) return;
    header_got_ = 0;
    FrameHeader h;
    std::memcpy(&h, header_, sizeof h);
    if (h.magic != wire::MAGIC || h.version != wire::VERSION || h.verb != uint8_t(wire::Verb::WRITE) || h.kind != uint8_t(wire::Kind::REPLY) ||
        h.body_bytes != 0)
      return broke_protocol();
    on_reply(h);
    if (state() != State::OPEN) return;
  }
}

void WriteConn::on_reply(const FrameHeader& h) {
  if (awaiting_.empty() || awaiting_.front()->request_id != h.request_id) {
    // A refusal may come before the frame is sent whole: the peer closes then, and the rest is not worth sending.
    if (!queue_.empty() && queue_.front()->request_id == h.request_id && h.status != 0) return close(h.status);
    return broke_protocol();
  }
  auto task = std::move(awaiting_.front());
  awaiting_.pop_front();
  auto extent = task->extent;
  if (!extent) return;
  if (h.status == uint32_t(Status::BUSY) && task->refers && task->tries++ < 3) {
    const int64_t wait = std::clamp<int64_t>(h.aux, 1, 500) * MS;
    auto self = std::static_pointer_cast<WriteConn>(shared_from_this());
    loop.at(now_ns() + wait, [self, task] { self->add(task); });
    return;
  }
  if (h.status == uint32_t(Status::STALE_MAP)) extent->on_stale(h.aux);
  extent->on_result(*task, h.status);
  extent->on_released(*task);
}

void WriteConn::on_closed(Outcome why) {
  {
    std::lock_guard lock(node.mutex);
    if (node.write.get() == this) node.write = nullptr;
  }
  auto fail = [&](std::deque<std::shared_ptr<WriteTask>>& tasks) {
    for (auto& task : std::exchange(tasks, {}))
      if (auto extent = task->extent) {
        extent->on_result(*task, why);
        extent->on_released(*task);
      } else {
        writer_->stats.shards_given_up++;   // copied aside, and lost with its connection
      }
  };
  fail(awaiting_);
  fail(queue_);
}

bool WriteConn::on_sweep(int64_t now) {
  if (Conn::on_sweep(now) || state() == State::CLOSED) return true;
  const bool idle = queue_.empty() && awaiting_.empty();
  const int64_t quiet = now - std::max(last_moved_ns_, opened_ns_);
  if (!idle && quiet > net.config.stall_timeout_ns) close(outcome(Fault::STALLED));
  if (idle && greeted_ && quiet > net.config.idle_timeout_ns) close(outcome(Fault::CANCELLED));
  return !idle;
}

}  // namespace kv::client
