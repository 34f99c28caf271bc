// libibverbs of one device, fake0, that registers memory and does nothing else: what a registration asks for is written down.
#include <infiniband/verbs.h>
#undef ibv_reg_mr

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

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

void stub_refuse(int error) { refused = error; }
const char* stub_record() { return record.c_str(); }

}  // extern "C"

// Looked for at the start and never called. By other names here, since the header has declared them.
#define TRAP(name) \
  extern "C" void trap_##name() __asm__(#name); \
  extern "C" void trap_##name() { __builtin_trap(); }
TRAP(ibv_create_comp_channel)
TRAP(ibv_destroy_comp_channel)
TRAP(ibv_create_cq)
TRAP(ibv_destroy_cq)
TRAP(ibv_get_cq_event)
TRAP(ibv_ack_cq_events)
TRAP(ibv_get_async_event)
TRAP(ibv_ack_async_event)
TRAP(ibv_create_qp)
TRAP(ibv_modify_qp)
TRAP(ibv_destroy_qp)
