// Kernels: registered, found, measured and launched, without doing anything; and how the driver finds its own symbols.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "card.h"

struct Configuration { Dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Configuration> configurations;
static char any_symbol[1 << 16];

API void** __cudaRegisterFatBinary(void* binary) {
  auto** handle = (void**)malloc(sizeof(void*));
  *handle = binary;
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API void __cudaRegisterManagedVar() {}
API void __cudaRegisterHostVar() {}
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API Status __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return INVALID_VALUE;
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *(void**)stream = last.stream;
  return OK;
}
API Status __cudaGetKernel(const void** kernel, const void* function) { *kernel = function; return OK; }

static Status launched() {
  kernel_ran();
  return OK;
}
API Status __cudaLaunchKernel() { return launched(); }
API Status __cudaLaunchKernel_ptsz() { return launched(); }
API Status cudaLaunchKernel() { return launched(); }
API Status cudaLaunchCooperativeKernel() { return launched(); }
API Status cudaLaunchKernelExC() { return launched(); }
API Status cuLaunchKernel() { return launched(); }
API Status cuLaunchKernelEx() { return launched(); }
API Status cuLaunchCooperativeKernel() { return launched(); }

// CUB chooses its tuning by this and refuses an architecture that the library was not built for: code for 8.6 runs on
// 8.7 and 8.9, code for 10.0 and 12.0 on their successors.
static int code_version() {
  int own = card().major * 10 + card().minor;
  if (own == 87 || own == 89) return 86;
  return own > 80 && own < 86 ? 80 : own > 90 ? own / 10 * 10 : own;
}

API Status cudaFuncGetAttributes(FunctionAttributes* to, const void*) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = 1024;
  to->numRegs = 32;
  to->ptxVersion = to->binaryVersion = code_version();
  to->maxDynamicSharedSizeBytes = 48 << 10;
  to->preferredShmemCarveout = -1;
  return OK;
}
API Status cudaFuncSetAttribute(const void*, int, int) { return OK; }
API Status cudaFuncSetCacheConfig(const void*, int) { return OK; }
API Status cudaKernelSetAttributeForDevice(const void*, int, int, int) { return OK; }
API Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int threads, size_t shared, unsigned) {
  int by_threads = threads > 0 ? card().threads_per_sm / threads : 1;
  int by_shared = shared ? (int)((size_t)card().shared_per_sm / shared) : card().blocks_per_sm;
  int most = by_threads < by_shared ? by_threads : by_shared;
  *count = most < 1 ? 1 : most > card().blocks_per_sm ? card().blocks_per_sm : most;
  return OK;
}
API Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads, shared, 0);
}
API Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads, shared, 0);
}
API Status cuOccupancyMaxPotentialClusterSize(int* count, void*, const void*) { *count = 8; return OK; }
API Status cuOccupancyMaxActiveClusters(int* count, void*, const void*) { *count = 16; return OK; }
API Status cudaOccupancyMaxActiveClusters(int* count, const void*, const void*) { *count = 16; return OK; }
API Status cudaGetSymbolAddress(void** pointer, const void*) { *pointer = any_symbol; return OK; }
API Status cudaGetSymbolSize(size_t* bytes, const void*) { *bytes = 256; return OK; }
API Status cudaGetFuncBySymbol(void** function, const void* symbol) { *function = (void*)symbol; return OK; }

// ------------------------------------------------------------------ modules and libraries: any handle will do
static Status any(void** handle) {
  *handle = any_symbol;
  return OK;
}
API Status cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) { return any(library); }
API Status cudaLibraryGetKernel(void** kernel, void*, const char*) { return any(kernel); }
API Status cudaLibraryUnload(void*) { return OK; }
API Status cuModuleLoad(void** module, const char*) { return any(module); }
API Status cuModuleLoadData(void** module, const void*) { return any(module); }
API Status cuModuleLoadDataEx(void** module, const void*, unsigned, int*, void**) { return any(module); }
API Status cuModuleUnload(void*) { return OK; }
API Status cuModuleGetFunction(void** function, void*, const char*) { return any(function); }
API Status cuModuleGetGlobal_v2(void** pointer, size_t* bytes, void*, const char*) {
  if (bytes) *bytes = 256;
  return pointer ? any(pointer) : OK;
}
API Status cuLibraryLoadData(void** library, const void*, int*, void**, unsigned, int*, void**, unsigned) { return any(library); }
API Status cuLibraryLoadFromFile(void** library, const char*, int*, void**, unsigned, int*, void**, unsigned) { return any(library); }
API Status cuLibraryUnload(void*) { return OK; }
API Status cuLibraryGetKernel(void** kernel, void*, const char*) { return any(kernel); }
API Status cuLibraryGetModule(void** module, void*) { return any(module); }
API Status cuLibraryGetGlobal(void** pointer, size_t* bytes, void* library, const char* name) {
  return cuModuleGetGlobal_v2(pointer, bytes, library, name);
}
API Status cuFuncGetModule(void** module, void*) { return any(module); }
API Status cuFuncGetAttribute(int* value, int which, void*) {
  constexpr int MOST_THREADS = 0, REGISTERS = 4;
  *value = which == MOST_THREADS ? 1024 : which == REGISTERS ? 32 : 0;
  return OK;
}
API Status cuFuncSetAttribute(void*, int, int) { return OK; }
API Status cuFuncSetCacheConfig(void*, int) { return OK; }
API Status cuKernelGetAttribute(int* value, int which, void* kernel, int) { return cuFuncGetAttribute(value, which, kernel); }
API Status cuKernelSetAttribute(int, int, void*, int) { return OK; }
API Status cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return OK; }
API Status cuLinkCreate_v2(unsigned, int*, void**, void** state) { return any(state); }
API Status cuLinkCreate(unsigned, int*, void**, void** state) { return any(state); }
API Status cuLinkAddData_v2() { return OK; }
API Status cuLinkAddData() { return OK; }
API Status cuLinkComplete(void*, void** image, size_t* bytes) {
  *bytes = 16;
  return any(image);
}
API Status cuLinkDestroy(void*) { return OK; }
API Status cuTensorMapEncodeTiled() { return OK; }
API Status cuTensorMapEncodeIm2col() { return OK; }

// ------------------------------------------------------------------ entry points by name
static Status unsupported() {
  xmem_vgpu_note_unmodelled("a driver function looked up by name");
  return NOT_SUPPORTED;
}

static void* own_symbol(const char* name) {
  static void* self = [] {
    Dl_info about;
    dladdr((void*)&cuLinkDestroy, &about);
    return dlopen(about.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  void* newest = dlsym(self, (std::string(name) + "_v2").c_str());
  return newest ? newest : dlsym(self, name);
}
API Status cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* result) {
  *function = own_symbol(name);
  if (!*function) *function = (void*)unsupported;  // PyTorch takes all it may ever need at once; only a call is refused
  if (result) *result = 0;
  return OK;
}
API Status cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
API Status cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* result) {
  *function = own_symbol(name);
  if (result) *result = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
API Status cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
API Status cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return NOT_FOUND;
}
