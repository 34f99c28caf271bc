// The thread that accepts, greets, and answers small requests inline: latency before throughput. SmallLoop and DirectoryLoop say with what.
#pragma once
#include "server_loop.hpp"

namespace kv {

// A listening socket on `host` (an IP address); `port` 0 becomes the one that was found. std::system_error with the errno of bind.
int listen_on(const std::string& host, uint16_t& port, const std::string& congestion_control);
uint64_t random_boot_id();
// Puts header and body behind what conn.out holds.
void append_reply(Conn& conn, const wire::FrameHeader& request, const std::vector<uint8_t>& body);

class FrontLoop : public Loop {
 public:
  // Takes ownership of the listening descriptor. A class below stops the loop in its destructor.
  FrontLoop(FrontShared& shared, int listener);
  ~FrontLoop() override;

 protected:
  virtual bool serves(wire::Role role) const = 0;
  virtual void on_greeting(wire::Hello&) {}   // what else the answer to a HELLO says
  // A request of an open connection. OK: the reply is in conn.out. BAD_REQUEST, TOO_LARGE: told, and the connection closed. Else: told.
  virtual Status answer(Conn& conn, const wire::FrameHeader& header, const uint8_t* body) = 0;
  virtual void give_away(Conn&) {}            // a BULK connection, greeted

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
  Parsed refuse(Conn& conn, const wire::FrameHeader& header, Status why);

  int listener_;
  bool listening_ = false;
  uint64_t next_id_ = FIRST_CONN;
  std::vector<uint8_t> scratch_;           // one recv
};

// Takes the fixed part of a request whose body is that and `count` items, exactly. Its other fields are the verb's to check.
template <class Request>
Status take_request(const wire::FrameHeader& header, const uint8_t* body, uint32_t count_max, size_t item_bytes, Request& request) {
  if (header.body_bytes < sizeof request) return Status::BAD_REQUEST;
  std::memcpy(&request, body, sizeof request);
  if (request.count > count_max) return Status::TOO_LARGE;
  return header.body_bytes == sizeof request + uint64_t(request.count) * item_bytes ? Status::OK : Status::BAD_REQUEST;
}

}  // namespace kv
