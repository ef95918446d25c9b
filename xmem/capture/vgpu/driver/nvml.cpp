// Just enough of NVML for PyTorch's out-of-memory message and its questions about links.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "cuda_abi.h"

API uint64_t xmem_vgpu_used(int device);
API uint64_t xmem_vgpu_taken();
API uint64_t xmem_vgpu_total();
API int xmem_vgpu_devices();

constexpr int TOO_SMALL = 7, NO_SUCH_THING = 3;
struct OldProcess { unsigned pid; unsigned long long bytes; };
struct Process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct MemoryInfo { unsigned long long total, free, used; };

static int ordinal(void* device) { return (int)(uintptr_t)device - 1; }
static unsigned long long in_use(void* device) { return xmem_vgpu_used(ordinal(device)) + xmem_vgpu_taken(); }

template <class Record> static int processes(void* device, unsigned* count, Record* to) {
  if (*count < 1) {
    *count = 1;
    return TOO_SMALL;
  }
  memset(to, 0, sizeof *to);
  to->pid = (unsigned)getpid();
  to->bytes = in_use(device);
  *count = 1;
  return 0;
}

API int nvmlInit_v2() { return 0; }
API int nvmlInit() { return 0; }
API int nvmlInitWithFlags(unsigned) { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlDeviceGetCount_v2(unsigned* count) { *count = (unsigned)xmem_vgpu_devices(); return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = (void*)(uintptr_t)(index + 1); return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** device) {
  unsigned domain = 0, bus = 1;
  sscanf(text, "%x:%x", &domain, &bus);
  *device = (void*)(uintptr_t)(bus ? bus : 1);
  return 0;
}
API int nvmlDeviceGetHandleByUUID(const char*, void** device) { *device = (void*)1; return 0; }
API int nvmlDeviceGetUUID(void* device, char* text, unsigned room) {
  int b = 0x10 + ordinal(device);
  snprintf(text, room, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b,
           b, b, b, b, b, b, b, b);
  return 0;
}
API int nvmlDeviceGetMemoryInfo(void* device, MemoryInfo* to) {
  *to = {xmem_vgpu_total(), xmem_vgpu_total() - in_use(device), in_use(device)};
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, OldProcess* to) { return processes(device, count, to); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* to) { return processes(device, count, to); }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDA_MAJOR >= 13 ? 13000 : 12080; return 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NO_SUCH_THING; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NO_SUCH_THING; }
API int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) { *status = 1; return 0; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NO_SUCH_THING; }
API const char* nvmlErrorString(int) { return "answered by the virtual GPU"; }
