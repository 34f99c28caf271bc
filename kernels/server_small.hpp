// The small verbs of a storage daemon.
#pragma once
#include "server.hpp"
#include "server_front.hpp"

namespace kv {

class SmallLoop final : public FrontLoop {
 public:
  // Takes ownership of the listening descriptor.
  SmallLoop(ServerShared& shared, int listener, std::vector<BulkLoop*> bulk);
  ~SmallLoop() override { stop(); }

 protected:
  bool serves(wire::Role role) const override { return role == wire::Role::SMALL || role == wire::Role::BULK; }
  void on_greeting(wire::Hello& mine) override;
  Status answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) override;
  void give_away(Conn& conn) override;
  void on_tick(int64_t now) override;

 private:
  Status discover(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status promise(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status withdraw(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status why(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status admit(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);
  Status suspect(Conn& conn, const wire::FrameHeader& header, const uint8_t* body);

  ServerShared& shared_;
  size_t next_bulk_ = 0;
  std::vector<BulkLoop*> bulk_;
  std::vector<uint8_t> found_;             // one Store::discover
  std::vector<wire::WritingName> names_;
  std::vector<wire::SuspectShard> shards_;
  std::vector<uint8_t> result_;
};

}  // namespace kv
