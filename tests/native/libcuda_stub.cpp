// A driver of two GPUs that are not there, for tests of client/movers/libcuda.py and registering.py: what of NVIDIA's libcuda they call, by
// the prototypes of its header, with a record of each call. Contexts, alignment and ranges are refused as the header says.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {
std::recursive_mutex mutex;
std::string record, taken;
std::map<std::string, int> failing;
std::map<int, int> attributes;
std::map<uint64_t, uint64_t> allocations;
int retained[2];
long exported = -1;   // bytes of what is exported, whatever was asked for; -1: as asked, -2: a pipe, which has no size
thread_local std::vector<CUcontext> stack;

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(0x1000 + uintptr_t(device)); }
int current() { return stack.empty() ? -1 : int(reinterpret_cast<uintptr_t>(stack.back()) - 0x1000); }

// Notes the call, with the GPU whose context is current; what it has to fail with.
CUresult called(const char* name, const char* format = "", ...) {
  std::lock_guard lock(mutex);
  char text[256];
  va_list more;
  va_start(more, format);
  vsnprintf(text, sizeof text, format, more);
  va_end(more);
  record += std::string(name) + "(" + text + ") in " + std::to_string(current()) + "\n";
  const auto found = failing.find(name);
  return found == failing.end() ? CUDA_SUCCESS : CUresult(found->second);
}
#define CALLED(...) \
  if (const CUresult fault = called(__func__, ##__VA_ARGS__)) return fault
}  // namespace

extern "C" {

CUresult cuInit(unsigned int flags) {
  CALLED("%u", flags);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_CONTEXT ? "invalid device context" : error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : nullptr;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetCount(int* count) {
  CALLED();
  return *count = 2, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  CALLED("%d", ordinal);
  if (ordinal < 0 || ordinal > 1) return CUDA_ERROR_INVALID_DEVICE;
  return *device = ordinal, CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  CALLED("%d, %d", room, device);
  return snprintf(name, size_t(room), "Stub %d", device), CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* name, int room, CUdevice device) {
  CALLED("%d, %d", room, device);
  return snprintf(name, size_t(room), "0000:%cB:00.0", '1' + device), CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  CALLED("%d", device);
  return *bytes = size_t(141) << 30, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  CALLED("%d, %d", int(attribute), device);
  const auto found = attributes.find(attribute);
  if (found == attributes.end()) return CUDA_ERROR_INVALID_VALUE;   // as an older driver
  return *value = found->second, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  CALLED("%d", device);
  retained[device]++;
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  CALLED("%d", device);
  retained[device]--;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  CALLED("%d", int(reinterpret_cast<uintptr_t>(context) - 0x1000));
  stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  CALLED();
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr at, size_t bytes, CUmemRangeHandleType type, unsigned long long flags) {
  CALLED("%llx, %zu, %d, %llu", (unsigned long long)at, bytes, int(type), flags);
  if (current() < 0) return CUDA_ERROR_INVALID_CONTEXT;
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
  std::lock_guard lock(mutex);
  auto after = allocations.upper_bound(at);
  const bool inside = after != allocations.begin() && (--after, at + bytes <= after->first + after->second);
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || at % page || bytes % page || !bytes || !inside) return CUDA_ERROR_INVALID_VALUE;
  int pair[2];
  if (exported == -2) {
    if (pipe(pair)) return CUDA_ERROR_UNKNOWN;
    close(pair[1]);
    return *static_cast<int*>(handle) = pair[0], CUDA_SUCCESS;
  }
  const int fd = memfd_create("dma-buf", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, exported < 0 ? off_t(bytes) : off_t(exported))) return CUDA_ERROR_UNKNOWN;
  return *static_cast<int*>(handle) = fd, CUDA_SUCCESS;
}
CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
  CALLED("%d, %d", int(target), int(scope));
  return current() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// --- for the test ---

void stub_reset() {
  std::lock_guard lock(mutex);
  record.clear();
  failing.clear();
  attributes.clear();
  allocations.clear();
  exported = -1;
  retained[0] = retained[1] = 0;
}
void stub_fail(const char* call, int code) { failing[call] = code; }
void stub_attribute(int attribute, int value) { attributes[attribute] = value; }
void stub_allocate(uint64_t at, uint64_t bytes) { allocations[at] = bytes; }
void stub_export(long bytes) { exported = bytes; }
int stub_current() { return current(); }
int stub_retained() { return retained[0] + retained[1]; }
const char* stub_record() {   // since it was last asked for
  std::lock_guard lock(mutex);
  taken.swap(record);
  record.clear();
  return taken.c_str();
}
int stub_number(const char* name) {   // as the header has it
#define NUMBER(x) \
  if (!strcmp(name, #x)) return int(x)
  NUMBER(CUDA_ERROR_NO_DEVICE);
  NUMBER(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
  NUMBER(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
  NUMBER(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  NUMBER(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
  NUMBER(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
  NUMBER(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER);
  NUMBER(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
  NUMBER(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX);
  NUMBER(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
  return -1;
}

}  // extern "C"
