// The card and its devices: settings, memory counts, properties and attributes.
#include "card.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

std::recursive_mutex driver_lock;
thread_local int current_device = 0;
std::atomic<uint64_t> launches{0};
static thread_local Status last_status = OK;

const char* text_setting(const char* name) {
  const char* text = getenv(name);
  return text ? text : "";
}

uint64_t number_setting(const char* name, uint64_t otherwise) {
  const char* text = text_setting(name);
  return *text ? strtoull(text, nullptr, 10) : otherwise;
}

static Card read_card() {
  Card made{};
  const char* name = text_setting("XMEM_VGPU_NAME");
  snprintf(made.name, sizeof made.name, "%s", *name ? name : "virtual GPU");
  made.total_bytes = number_setting("XMEM_VGPU_BYTES", 24ull << 30);
  made.taken_bytes = number_setting("XMEM_VGPU_TAKEN_BYTES", 0);
  made.devices = (int)number_setting("XMEM_VGPU_DEVICES", 1);
  if (made.devices < 1 || made.devices > MOST_DEVICES) made.devices = MOST_DEVICES;
  made.major = (int)number_setting("XMEM_VGPU_MAJOR", 8);
  made.minor = (int)number_setting("XMEM_VGPU_MINOR", 0);
  made.multiprocessors = (int)number_setting("XMEM_VGPU_MULTIPROCESSORS", 108);
  made.sm_clock_khz = (int)number_setting("XMEM_VGPU_SM_CLOCK_KHZ", 1410000);
  made.memory_clock_khz = (int)number_setting("XMEM_VGPU_MEMORY_CLOCK_KHZ", 1215000);
  made.bus_bits = (int)number_setting("XMEM_VGPU_BUS_BITS", 5120);
  made.l2_bytes = (int)number_setting("XMEM_VGPU_L2_BYTES", 40 * MIB);
  made.threads_per_sm = (int)number_setting("XMEM_VGPU_THREADS_PER_SM", 2048);
  made.blocks_per_sm = (int)number_setting("XMEM_VGPU_BLOCKS_PER_SM", 32);
  made.shared_per_sm = (int)number_setting("XMEM_VGPU_SHARED_PER_SM", 164 << 10);
  made.shared_per_block_optin = (int)number_setting("XMEM_VGPU_SHARED_PER_BLOCK_OPTIN", 163 << 10);
  made.shared_reserved = made.shared_per_sm - made.shared_per_block_optin;
  made.communicator_bytes = number_setting("XMEM_VGPU_COMMUNICATOR_BYTES", 0);
  return made;
}

const Card& card() {
  static const Card it = read_card();
  return it;
}

Usage& usage(int device) {
  static Usage all[MOST_DEVICES];
  return all[device];
}

uint64_t free_memory(int device) {
  uint64_t taken = card().taken_bytes + usage(device).used_bytes;
  return card().total_bytes > taken ? card().total_bytes - taken : 0;
}

bool take_memory(int device, uint64_t bytes) {
  if (bytes > free_memory(device)) return false;
  Usage& own = usage(device);
  own.used_bytes += bytes;
  if (own.used_bytes > own.peak_bytes) own.peak_bytes = own.used_bytes;
  return true;
}

void give_memory(int device, uint64_t bytes) { usage(device).used_bytes -= bytes; }

Status failed(Status status) {
  if (status != OK) last_status = status;
  return status;
}

// ------------------------------------------------------------------ what the recorder asks
static std::set<std::string>& unmodelled() {
  static auto* names = new std::set<std::string>();
  return *names;
}
API void xmem_vgpu_note_unmodelled(const char* name) {
  LOCKED;
  unmodelled().insert(name);
}
API int xmem_vgpu_unmodelled(char* text, int room) {
  LOCKED;
  std::string all;
  for (auto& name : unmodelled()) all += (all.empty() ? "" : "\n") + name;
  return snprintf(text, (size_t)room, "%s", all.c_str());
}
API uint64_t xmem_vgpu_used(int device) { return usage(device).used_bytes; }
API uint64_t xmem_vgpu_peak(int device) { return usage(device).peak_bytes; }
API uint64_t xmem_vgpu_taken() { return card().taken_bytes; }
API uint64_t xmem_vgpu_total() { return card().total_bytes; }
API int xmem_vgpu_devices() { return card().devices; }
API uint64_t xmem_vgpu_launches() { return launches; }

// ------------------------------------------------------------------ devices
static bool is_device(int device) { return device >= 0 && device < card().devices; }

static void describe(DeviceProperties* to, int device) {
  const Card& it = card();
  memset(to, 0, sizeof *to);
  snprintf(to->name, sizeof to->name, "%s", it.name);
  memset(to->uuid, 0x10 + device, sizeof to->uuid);
  to->totalGlobalMem = it.total_bytes;
  to->sharedMemPerBlock = 48 << 10;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->warpSize = 32;
  to->memPitch = 2147483647;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->totalConstMem = 65536;
  to->major = it.major;
  to->minor = it.minor;
  to->textureAlignment = to->surfaceAlignment = 512;
  to->texturePitchAlignment = 32;
  to->multiProcessorCount = it.multiprocessors;
  to->canMapHostMemory = to->concurrentKernels = to->unifiedAddressing = to->managedMemory = 1;
  to->pciBusID = 1 + device;
  to->asyncEngineCount = 2;
  to->memoryBusWidth = it.bus_bits;
  to->l2CacheSize = it.l2_bytes;
  to->persistingL2CacheMaxSize = it.l2_bytes / 4 * 3;
  to->maxThreadsPerMultiProcessor = it.threads_per_sm;
  to->streamPrioritiesSupported = to->globalL1CacheSupported = to->localL1CacheSupported = 1;
  to->sharedMemPerMultiprocessor = (size_t)it.shared_per_sm;
  to->sharedMemPerBlockOptin = (size_t)it.shared_per_block_optin;
  to->reservedSharedMemPerBlock = (size_t)it.shared_reserved;
  to->concurrentManagedAccess = to->computePreemptionSupported = to->cooperativeLaunch = 1;
  to->maxBlocksPerMultiProcessor = it.blocks_per_sm;
  to->hostRegisterSupported = to->memoryPoolsSupported = to->canUseHostPointerForRegisteredMem = 1;
  to->ipcEventSupported = 1;
  to->clusterLaunch = it.major >= 9;
#if CUDA_MAJOR < 13
  to->clockRate = it.sm_clock_khz;
  to->memoryClockRate = it.memory_clock_khz;
  to->deviceOverlap = 1;
#else
  to->hostNumaId = to->deviceNumaId = -1;
#endif
}

// Numbers of cudaDeviceAttr, which are those of CUdevice_attribute.
static int attribute(int which, int device) {
  const Card& it = card();
  switch (which) {
    case 1: case 2: case 3: return 1024;                       // threads of a block
    case 4: return 64;
    case 5: case 11: return 2147483647;                        // grid, pitch
    case 6: case 7: return 65535;
    case 8: return 48 << 10;                                   // shared memory of a block
    case 9: case 12: case 82: return 65536;                    // constant memory, registers
    case 10: return 32;                                        // warp
    case 13: return it.sm_clock_khz;
    case 14: return 512;                                       // alignment
    case 16: return it.multiprocessors;
    case 33: return 1 + device;                                // bus
    case 36: return it.memory_clock_khz;
    case 37: return it.bus_bits;
    case 38: return it.l2_bytes;
    case 39: return it.threads_per_sm;
    case 40: return 2;                                         // copy engines
    case 75: return it.major;
    case 76: return it.minor;
    case 81: return it.shared_per_sm;
    case 97: return it.shared_per_block_optin;
    case 106: return it.blocks_per_sm;
    case 108: return it.l2_bytes / 4 * 3;
    case 111: return it.shared_reserved;
    case 120: return it.major >= 9;                            // cluster launch
    // Supported: overlap, mapped host memory, concurrent kernels, unified addressing, stream priorities, caches,
    // managed memory, preemption, cooperative launch, host registration, virtual memory and its handles, pools.
    case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95:
    case 99: case 102: case 103: case 113: case 115: return 1;
    default: return 0;
  }
}

API Status cudaGetDeviceCount(int* count) { *count = card().devices; return OK; }
API Status cudaGetDevice(int* device) { *device = current_device; return OK; }
API Status cudaSetDevice(int device) {
  if (!is_device(device)) return failed(INVALID_DEVICE);
  current_device = device;
  return OK;
}
API Status cudaGetDeviceProperties_v2(DeviceProperties* to, int device) {
  if (!is_device(device)) return failed(INVALID_DEVICE);
  describe(to, device);
  return OK;
}
API Status cudaGetDeviceProperties(DeviceProperties* to, int device) { return cudaGetDeviceProperties_v2(to, device); }
API Status cudaDeviceGetAttribute(int* value, int which, int device) {
  if (!is_device(device)) return failed(INVALID_DEVICE);
  *value = attribute(which, device);
  return OK;
}
API Status cudaDriverGetVersion(int* version) { *version = CUDA_MAJOR >= 13 ? 13000 : 12080; return OK; }
API Status cudaRuntimeGetVersion(int* version) { *version = CUDA_MAJOR >= 13 ? 13000 : 12040; return OK; }
API Status cudaDeviceGetPCIBusId(char* text, int room, int device) {
  snprintf(text, (size_t)room, "0000:%02X:00.0", device + 1);
  return OK;
}
API Status cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
API Status cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return OK; }
API Status cudaDeviceEnablePeerAccess(int, unsigned) { return OK; }
API Status cudaDeviceDisablePeerAccess(int) { return OK; }
API Status cudaDeviceSynchronize() { finish_events(); return OK; }
API Status cudaDeviceReset() { return OK; }
API Status cudaInitDevice(int, unsigned, unsigned) { return OK; }
API Status cudaDeviceGetLimit(size_t* value, int) { *value = 1024; return OK; }
API Status cudaDeviceSetLimit(int, size_t) { return OK; }
API Status cudaProfilerStart() { return OK; }
API Status cudaProfilerStop() { return OK; }
API Status cudaGetLastError() { Status status = last_status; last_status = OK; return status; }
API Status cudaPeekAtLastError() { return last_status; }

static const char* error_word(Status status, bool sentence) {
  switch (status) {
    case OK: return sentence ? "no error" : "cudaSuccess";
    case INVALID_VALUE: return sentence ? "invalid argument" : "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return sentence ? "out of memory" : "cudaErrorMemoryAllocation";
    case INVALID_DEVICE: return sentence ? "invalid device ordinal" : "cudaErrorInvalidDevice";
    case NOT_READY: return sentence ? "device not ready" : "cudaErrorNotReady";
    default: return sentence ? "operation not supported on the virtual GPU" : "cudaErrorNotSupported";
  }
}
API const char* cudaGetErrorName(Status status) { return error_word(status, false); }
API const char* cudaGetErrorString(Status status) { return error_word(status, true); }

// ------------------------------------------------------------------ the same by the driver's names
API Status cuInit(unsigned) { return OK; }
API Status cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
API Status cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
API Status cuDeviceGet(int* device, int ordinal) {
  if (!is_device(ordinal)) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}
API Status cuDeviceGetName(char* text, int room, int) { snprintf(text, (size_t)room, "%s", card().name); return OK; }
API Status cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = card().total_bytes; return OK; }
API Status cuDeviceGetAttribute(int* value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
API Status cuDeviceGetUuid(char* uuid, int device) { memset(uuid, 0x10 + device, 16); return OK; }
API Status cuDeviceGetUuid_v2(char* uuid, int device) { return cuDeviceGetUuid(uuid, device); }
API Status cuGetErrorString(Status status, const char** text) { *text = cudaGetErrorString(status); return OK; }
API Status cuGetErrorName(Status status, const char** text) { *text = cudaGetErrorName(status); return OK; }
