// One epoll thread with an inbox, and the connections that live on it. FrontLoop and BulkLoop say what a connection does.
//
// Edge-triggered: an event sets flags and puts the connection on the ready list; serve() works until the socket says "again" or its
// turn is over (then the connection goes to the end of the list: one fast reader cannot keep others waiting).
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "server_shared.hpp"
#include "wire.hpp"

namespace kv {

enum class Phase : uint8_t {
  GREETING,   // no HELLO yet
  OPEN,
  CLOSING,    // the last reply is on its way; input is thrown away
  LINGER,     // all is sent and our side shut; wait a little for the peer's end, so that a reset does not eat the reply
};

struct BulkState;   // server_bulk.hpp
namespace verbs {
class Endpoint;
}

struct Conn {
  Conn(uint64_t number, int descriptor);
  ~Conn();
  Conn(const Conn&) = delete;
  Conn& operator=(const Conn&) = delete;

  const uint64_t id;
  const int fd;
  Phase phase = Phase::GREETING;
  wire::Role role = wire::Role::SMALL;   // from its HELLO on
  bool readable = false, writable = true, ready = false;
  bool hangup = false;              // epoll has told of the peer's end: it may lie behind data, without another edge
  bool eof = false;                 // the peer will send no more
  bool stalled = false;             // `in` may hold whole frames: parsing stopped for want of room in `out`
  std::vector<uint8_t> in;          // received, not yet parsed: in[in_at..]
  size_t in_at = 0;
  std::vector<uint8_t> out;         // to send: out[out_at..]
  size_t out_at = 0;
  int64_t window_ns = 0;            // start of the window in which the peer has to make progress
  uint64_t window_bytes = 0;        // moved in it
  int64_t used_ns = 0;              // last request or greeting
  std::unique_ptr<BulkState> bulk;  // of a BULK connection
  uint32_t agent = 0;               // of a DIRECTORY connection: who speaks on it, a number of directory_agents.hpp; 0: nobody yet

  size_t pending() const { return out.size() - out_at; }
  void moved(uint64_t bytes) { window_bytes += bytes; }
};

struct Message {
  enum class Kind : uint8_t { ADOPT, READ_DONE, VERBS_READY, WAKE } kind = Kind::WAKE;
  uint64_t conn = 0, serial = 0;
  Status status = Status::OK;                  // of VERBS_READY
  std::unique_ptr<Conn> adopted;
  std::shared_ptr<verbs::Endpoint> endpoint;   // of VERBS_READY, and whom it is connected to
  wire::VerbsOpen peer{};
};

class Loop {
 public:
  explicit Loop(FrontShared& shared);
  virtual ~Loop();
  void start(const char* name, bool gives_way = false);   // gives_way: behind threads that somebody waits for
  void stop();               // closes every connection, joins; harmless twice
  void post(Message message);   // any thread

 protected:
  enum class Turn : uint8_t { REST, AGAIN, CLOSE, MOVED };   // MOVED: serve() gave the connection away
  virtual Turn serve(Conn& conn) = 0;
  virtual void on_message(Message&) {}
  virtual void on_event(uint64_t) {}            // of a descriptor that watch() added
  virtual bool owes(const Conn& conn) const = 0;   // does the peer owe us bytes, or room for ours?
  virtual bool idle(const Conn& conn) const = 0;   // nothing asked, nothing owed
  virtual void on_closed(Conn&) {}
  virtual void on_turn() {}                     // after every connection that was ready has been served
  virtual void on_tick(int64_t) {}              // about four times a second while anything is going on

  void adopt(std::unique_ptr<Conn> conn);       // this loop's thread only
  std::unique_ptr<Conn> release(Conn& conn);    // takes it out of this loop, open
  void make_ready(Conn& conn);
  Conn* find(uint64_t id);
  void watch(int fd, uint64_t token, bool on);  // tokens are below FIRST_CONN, or a connection's number: then it is served
  size_t connections() const { return conns_.size(); }

  // After a failed send or recv: is the connection dead? (Not for "again" and "interrupted".) One that timed out counts as cut.
  bool dead(int error);
  // Sends conn.out. False: the connection is dead.
  bool flush(Conn& conn, bool more);
  // Throws away what the peer still sends; true when its end has come (or it is dead).
  bool swallow(Conn& conn);
  // CLOSING and LINGER, once nothing else is to be sent.
  Turn finish(Conn& conn);

  bool hurried_ = false;     // tick even where nobody is waited for
  static constexpr uint64_t WAKE_TOKEN = 0, LISTEN_TOKEN = 1, FIRST_CONN = 16;
  FrontShared& common_;

 private:
  void run();
  bool sweep(int64_t now, bool away);
  void close(Conn& conn);

  int epoll_ = -1, wake_ = -1;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex inbox_mutex_;
  std::vector<Message> inbox_;
  std::unordered_map<uint64_t, std::unique_ptr<Conn>> conns_;
  std::deque<uint64_t> ready_;
};

// Appends a frame header to `out`; `body_bytes` bytes of body follow it. The check covers them where the frame has one.
void append_header(std::vector<uint8_t>& out, const wire::FrameHeader& request, wire::Kind kind, Status status, uint32_t body_bytes,
                   uint32_t body_check, uint32_t aux);
// A bare reply (no body).
inline void append_bare(std::vector<uint8_t>& out, const wire::FrameHeader& request, Status status, uint32_t aux = 0) {
  append_header(out, request, wire::Kind::REPLY, status, 0, 0, aux);
}
// NOT_OURS: not even a header, close without a word. REFUSED: answer `why`, then close.
enum class HeaderCheck : uint8_t { OK, NOT_OURS, REFUSED };
HeaderCheck check_header(const wire::FrameHeader& header, const Conn& conn, Status& why);
inline Op op_of(uint8_t verb) {
  switch (wire::Verb(verb)) {
    case wire::Verb::DISCOVER: return Op::DISCOVER;
    case wire::Verb::PROMISE: return Op::PROMISE;
    case wire::Verb::WITHDRAW: return Op::WITHDRAW;
    case wire::Verb::WHY: return Op::WHY;
    case wire::Verb::ADMIT: return Op::ADMIT;
    case wire::Verb::SUSPECT: return Op::SUSPECT;
    case wire::Verb::READ:
    case wire::Verb::VERBS_READ: return Op::READ;
    case wire::Verb::WRITE: return Op::WRITE;
    case wire::Verb::REGISTER: return Op::REGISTER;
    case wire::Verb::LOCATE: return Op::LOCATE;
    case wire::Verb::TOUCH: return Op::TOUCH;
    case wire::Verb::FORGET: return Op::FORGET;
    case wire::Verb::REPORT: return Op::REPORT;
    case wire::Verb::STATUS: return Op::STATUS;
    default: return Op::HELLO;   // VERBS_OPEN, too
  }
}

}  // namespace kv
