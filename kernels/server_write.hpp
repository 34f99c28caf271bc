// The threads that put records into the store, so that a commit never stalls a read.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "server.hpp"
#include "server_loop.hpp"

namespace kv {

struct PutTask {
  Loop* loop = nullptr;
  uint64_t conn = 0, serial = 0, bytes = 0;
  Arena::Buffer record;
};

class Putter {
 public:
  Putter(ServerShared& shared, uint32_t threads);
  ~Putter() { stop(); }
  void put(PutTask task);
  void stop();   // what is queued and unacknowledged is dropped; harmless twice

 private:
  void run();
  ServerShared& shared_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<PutTask> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kv
