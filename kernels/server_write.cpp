#include "server_write.hpp"

#include <pthread.h>
#include <signal.h>

#include "priority.hpp"

namespace kv {

Putter::Putter(ServerShared& shared, uint32_t threads) : shared_(shared) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  for (uint32_t i = 0; i < threads; i++) {
    threads_.emplace_back([this] { run(); });
    pthread_setname_np(threads_.back().native_handle(), "kv-write");
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void Putter::put(PutTask task) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Putter::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  wake_.notify_all();
  for (auto& t : threads_)
    if (t.joinable()) t.join();
}

void Putter::run() {
  give_way_to_loads();
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    PutTask task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const RecordHead& head = RecordView{task.record.data()}.head();
    Status status = Status::INTERNAL;
    // Readers use the list of a record's own epoch, so a newer epoch than ours is fine (and tells us to look for it); a writer that is
    // behind would place extents where the map no longer wants them.
    const uint64_t epoch = shared_.epoch.load();
    if (task.bytes < sizeof(RecordHead)) status = Status::BAD_REQUEST;
    else if (head.magic == RECORD_MAGIC && head.write_epoch < epoch) status = Status::STALE_MAP;
    else {
      try {
        status = shared_.store.put(task.record.data(), task.bytes);
      } catch (const std::exception&) {
        add(shared_.stats.faults);
      }
    }
    if (status == Status::OK || status == Status::EXISTS) shared_.stats.saw_epoch(head.write_epoch);
    task.record = Arena::Buffer();
    Message done;
    done.kind = Message::Kind::PUT_DONE;
    done.conn = task.conn;
    done.serial = task.serial;
    done.status = status;
    task.loop->post(std::move(done));
    lock.lock();
  }
}

}  // namespace kv
