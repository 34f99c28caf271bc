// libibverbs of one device, fake0, that moves nothing. What a registration asks for is written down; what is posted is acknowledged, and its
// immediates arrive at the peer, when a test says so.
#include <infiniband/verbs.h>
#undef ibv_reg_mr

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {
std::string record;
int refused;   // errno of ibv_reg_dmabuf_mr
ibv_device device;
ibv_device* list[] = {&device, nullptr};
verbs_context context;
ibv_pd pd;

template <class... Values>
void note(const char* format, Values... values) {
  char text[256];
  snprintf(text, sizeof text, format, values...);
  record += text;
}
int query_port(ibv_context*, uint8_t, ibv_port_attr* attr, size_t bytes) {
  memset(attr, 0, bytes);
  attr->state = IBV_PORT_ACTIVE;
  attr->active_mtu = IBV_MTU_4096;
  attr->max_msg_sz = 1u << 30;
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}
struct Queue : ibv_cq {
  std::deque<ibv_wc> done;
};
struct Pair : ibv_qp {
  uint32_t peer = 0, receives = 0;
};
struct Posted {
  Pair* by;
  ibv_wc sent;
  bool signaled, immediate;
};
std::mutex mutex;
std::map<uint32_t, Pair*> pairs;
std::vector<Posted> posted;
size_t acknowledged, arrived;   // of posted

int poll_cq(ibv_cq* cq, int room, ibv_wc* into) {
  std::lock_guard lock(mutex);
  auto& done = static_cast<Queue*>(cq)->done;
  int n = 0;
  for (; n < room && !done.empty(); n++, done.pop_front()) into[n] = done.front();
  return n;
}
int req_notify_cq(ibv_cq*, int) { return 0; }
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr**) {
  std::lock_guard lock(mutex);
  for (; wr; wr = wr->next) {
    ibv_wc done{};
    done.wr_id = wr->wr_id;
    done.imm_data = wr->imm_data;
    posted.push_back({static_cast<Pair*>(qp), done, bool(wr->send_flags & IBV_SEND_SIGNALED), wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM});
  }
  return 0;
}
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr**) {
  std::lock_guard lock(mutex);
  for (; wr; wr = wr->next) static_cast<Pair*>(qp)->receives++;
  return 0;
}
ibv_mr* registered() {
  ibv_mr* mr = new ibv_mr{};
  mr->context = &context.context;
  mr->lkey = mr->rkey = 7;
  return mr;
}
}  // namespace

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  strcpy(device.name, "fake0");
  device.transport_type = IBV_TRANSPORT_IB;
  return *count = 1, list;
}
void ibv_free_device_list(ibv_device**) {}
ibv_context* ibv_open_device(ibv_device*) {
  context.context.device = &device;
  context.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  context.context.async_fd = -1;
  context.sz = sizeof context;
  context.query_port = query_port;
  context.context.ops.poll_cq = poll_cq;
  context.context.ops.req_notify_cq = req_notify_cq;
  context.context.ops.post_send = post_send;
  context.context.ops.post_recv = post_recv;
  return &context.context;
}
int ibv_close_device(ibv_context*) { return 0; }
int ibv_query_device(ibv_context*, ibv_device_attr* attr) {
  memset(attr, 0, sizeof *attr);
  attr->phys_port_cnt = 1;
  attr->max_qp_wr = attr->max_sge = attr->max_cqe = 1024;
  return 0;
}
ssize_t _ibv_query_gid_table(ibv_context*, ibv_gid_entry* entries, size_t, uint32_t, size_t) {
  entries[0] = {};
  entries[0].port_num = 1;
  entries[0].gid_type = IBV_GID_TYPE_ROCE_V2;
  entries[0].gid.raw[15] = 1;
  return 1;
}
ibv_pd* ibv_alloc_pd(ibv_context*) { return &pd; }
int ibv_dealloc_pd(ibv_pd*) { return 0; }
ibv_mr* ibv_reg_mr(ibv_pd*, void* at, size_t bytes, int access) {
  note("ibv_reg_mr %p %zu access %d\n", at, bytes, access);
  return registered();
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access) {
  note("ibv_reg_dmabuf_mr %llu %zu %#llx access %d%s\n", (unsigned long long)offset, bytes, (unsigned long long)iova, access, fd < 0 ? " of nothing" : "");
  if (refused) return errno = refused, nullptr;
  return registered();
}
int ibv_dereg_mr(ibv_mr* mr) {
  note("ibv_dereg_mr\n");
  delete mr;
  return 0;
}
int ibv_fork_init() { return 0; }

ibv_comp_channel* ibv_create_comp_channel(ibv_context* at) { return new ibv_comp_channel{at, eventfd(0, EFD_CLOEXEC), 0}; }
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete channel;
  return 0;
}
ibv_cq* ibv_create_cq(ibv_context* at, int, void*, ibv_comp_channel*, int) {
  Queue* queue = new Queue{};
  queue->context = at;
  return queue;
}
int ibv_destroy_cq(ibv_cq* cq) {
  delete static_cast<Queue*>(cq);
  return 0;
}
ibv_qp* ibv_create_qp(ibv_pd*, ibv_qp_init_attr* init) {
  std::lock_guard lock(mutex);
  Pair* pair = new Pair{};
  pair->context = &context.context;
  pair->send_cq = init->send_cq;
  pair->recv_cq = init->recv_cq;
  pair->qp_num = uint32_t(pairs.size() + 1);
  return pairs[pair->qp_num] = pair;
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  std::lock_guard lock(mutex);
  if (mask & IBV_QP_DEST_QPN) static_cast<Pair*>(qp)->peer = attr->dest_qp_num;
  if (attr->qp_state == IBV_QPS_RESET) note("reset\n");
  return 0;
}
int ibv_destroy_qp(ibv_qp*) { return 0; }   // its number is not used again
int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) { return -1; }
void ibv_ack_cq_events(ibv_cq*, unsigned) {}
int ibv_get_async_event(ibv_context*, ibv_async_event*) { return -1; }
void ibv_ack_async_event(ibv_async_event*) {}

// --- for the test ---

int stub_posted() {
  std::lock_guard lock(mutex);
  return int(posted.size());
}
void stub_acknowledge() {   // all that was posted
  std::lock_guard lock(mutex);
  for (; acknowledged < posted.size(); acknowledged++)
    if (posted[acknowledged].signaled) static_cast<Queue*>(posted[acknowledged].by->send_cq)->done.push_back(posted[acknowledged].sent);
}
int stub_arrive() {         // likewise; how many immediates, -1: one found no receive request
  std::lock_guard lock(mutex);
  int told = 0;
  for (; arrived < posted.size(); arrived++) {
    if (!posted[arrived].immediate) continue;
    Pair* peer = pairs.at(posted[arrived].by->peer);
    if (!peer->receives) return -1;
    peer->receives--;
    ibv_wc done = posted[arrived].sent;
    done.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    static_cast<Queue*>(peer->recv_cq)->done.push_back(done);
    told++;
  }
  return told;
}
void stub_refuse(int error) { refused = error; }
const char* stub_record() { return record.c_str(); }

}  // extern "C"
