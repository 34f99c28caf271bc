// The thread that accepts, greets, and answers the small verbs inline: latency before throughput.
#pragma once
#include "server_loop.hpp"

namespace kv {

class SmallLoop final : public Loop {
 public:
  // Takes ownership of the listening descriptor.
  SmallLoop(ServerShared& shared, int listener, std::vector<BulkLoop*> bulk);
  ~SmallLoop() override;

 protected:
  Turn serve(Conn& conn) override;
  void on_event(uint64_t token) override;
  void on_tick(int64_t now) override;
  void on_message(Message&) override;
  bool owes(const Conn& conn) const override { return conn.pending() || conn.in.size() > conn.in_at; }
  bool idle(const Conn&) const override { return true; }

 private:
  enum class Parsed : uint8_t { MORE, ANSWERED, REFUSED, GONE, MOVED };
  void accept_some();
  void listen(bool on);
  Parsed parse(Conn& conn, const uint8_t*& at, const uint8_t* end);
  Parsed greet(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status discover(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status promise(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status withdraw(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status why(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status admit(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Parsed refuse(Conn& conn, const wire::FrameHeader& header, Status why);

  int listener_;
  bool listening_ = false;
  uint64_t next_id_ = FIRST_CONN;
  size_t next_bulk_ = 0;
  std::vector<BulkLoop*> bulk_;
  std::vector<uint8_t> scratch_;           // one recv
  std::vector<uint8_t> found_;             // one Store::discover
  std::vector<wire::WritingName> names_;
  std::vector<uint8_t> result_;
};

}  // namespace kv
