// The threads of READ and those of WRITE. Requests of a connection are answered in order of arrival; input is read ahead of the answers,
// so that the disk is asked early. Threads that receive records run behind those that read: a connection goes there with its first WRITE
// and comes back with its next READ. Such a thread receives, checks and writes record after record, while they are in the processor's
// cache, and commits what it has written when nobody has more for it: the more there is to do, the fewer commits.
#pragma once
#include <unordered_set>

#include "io_engine.hpp"
#include "server.hpp"
#include "server_loop.hpp"
#include "server_verbs.hpp"

namespace kv {

struct BulkRequest {
  wire::FrameHeader header{};
  uint64_t serial = 0;
  int64_t born_ns = 0;
  bool done = false, last = false;  // last: the connection closes after this answer
  Status status = Status::OK;
  std::shared_ptr<ReadJob> read;
  std::vector<VerbsPlace> places;   // of a VERBS_READ: of its items
  uint32_t round = 0;               // likewise
  std::optional<wire::VerbsOpen> verbs_reply;
};

struct BulkState {
  enum class Input : uint8_t { HEADER, READ_BODY, VERBS_BODY, RECORD, DISCARD, STOPPED } input = Input::HEADER;
  wire::FrameHeader header{};
  int64_t born_ns = 0;              // of the frame being received
  uint64_t got = 0;                 // of the part being received
  std::vector<uint8_t> body;
  Arena::Buffer record;
  Status refusal = Status::OK;      // of the record being discarded
  std::deque<BulkRequest> requests;
  uint64_t next_serial = 1;
  bool waiting = false;             // the front READ waits for its engine
  Source tail;                      // of the item being sent: what follows conn.out
  bool item_open = false;
  // One VERBS_OPEN a connection. Null: not asked. What it says: nobody waits for the answer, which has come, or has nowhere to go.
  std::shared_ptr<std::atomic<bool>> verbs_settled;
  std::unique_ptr<VerbsState> verbs;
};

class BulkLoop final : public Loop {
 public:
  BulkLoop(ServerShared& shared, ReadService& reads);
  explicit BulkLoop(ServerShared& shared) : Loop(shared), shared_(shared) {}   // for records alone
  ~BulkLoop() override { stop(); }
  void hand_to(std::vector<BulkLoop*> others) { others_ = std::move(others); }   // what is theirs; before start()
  void share_pool();   // makes its pool known to the device; verbs::Fault. Before start()

 protected:
  Turn serve(Conn& conn) override;
  void on_message(Message& message) override;
  void on_closed(Conn& conn) override;
  void on_turn() override { commit(); }
  bool owes(const Conn& conn) const override;
  bool idle(const Conn& conn) const override;

 private:
  enum class Step : uint8_t { MOVED, STUCK, DEAD };
  static bool owes_by_rdma(const BulkState& b);
  Step send_some(Conn& conn, int64_t& budget);
  Step send_items(Conn& conn, BulkRequest& request, int64_t& budget);
  Step send_tail(Conn& conn, int64_t& budget);
  Step receive_some(Conn& conn, int64_t& budget);
  Step take(Conn& conn, uint8_t* to, uint64_t want, int64_t& budget);
  bool wants_input(const Conn& conn) const;
  bool for_others(const Conn& conn) const;
  bool misplaced(const Conn& conn) const { return for_others(conn) && conn.bulk->requests.empty(); }
  void on_header(Conn& conn);
  void on_read(Conn& conn);
  void on_record(Conn& conn);
  void commit();
  BulkRequest& enqueue(Conn& conn, const wire::FrameHeader& header);
  void refuse(Conn& conn, Status why);          // a bare answer, then close
  void answered(Conn& conn);                    // the front request
  void open_extents(const std::shared_ptr<ReadJob>& job, uint32_t end, int64_t& budget);   // up to `end`
  // server_verbs.cpp
  void on_verbs_open(Conn& conn);
  void on_verbs_ready(Conn* conn, Message& message);
  void end_verbs(Conn& conn);
  bool take_verbs_read(Conn& conn, wire::VerbsRead& head);
  bool reap(Conn& conn);
  void wake_hungry();
  Step write_items(Conn& conn, BulkRequest& request, int64_t& budget);
  Step write_part(Conn& conn, BulkRequest& request, VerbsPlace place, int64_t& budget);
  Step tell(VerbsState& v, const BulkRequest& request, Status status);
  Step end_item(VerbsState& v, const BulkRequest& request, Status status, ibv_send_wr& wr, VerbsState::Posted posted);
  bool submit(VerbsState& v, ibv_send_wr& wr, VerbsState::Posted posted);
  Step rest(VerbsState& v);

  ServerShared& shared_;
  std::unique_ptr<ReadEngine> engine_;       // null: for records alone
  std::vector<BulkLoop*> others_;
  size_t next_other_ = 0;
  Puts puts_;                                // written, to be committed, and whom each was for
  std::vector<std::pair<uint64_t, uint64_t>> put_for_;   // connection, serial
  std::unique_ptr<Arena> pool_;              // registered; null without RDMA
  std::unordered_set<uint64_t> hungry_;      // connections that found no room in it
};

}  // namespace kv
