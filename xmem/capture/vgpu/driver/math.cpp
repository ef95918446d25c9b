// cuBLAS, cuBLASLt and cuDNN: calls succeed and compute nothing; cuDNN's heuristics and workspace sizes are its own.
//
// From cuDNN 9.8 on its documented mode without a device is used: a device properties descriptor made from the card's
// description goes with every heuristic, engine and plan. An older cuDNN is never asked: one engine, no workspace.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "card.h"

// ------------------------------------------------------------------ cuBLAS and cuBLASLt
struct Blas { int math_mode, pointer_mode; void* stream; };
API Status cublasCreate_v2(void** handle) { *handle = new Blas(); return OK; }
API Status cublasDestroy_v2(void* handle) { delete (Blas*)handle; return OK; }
API Status cublasSetStream_v2(void* handle, void* stream) { ((Blas*)handle)->stream = stream; return OK; }
API Status cublasGetStream_v2(void* handle, void** stream) { *stream = ((Blas*)handle)->stream; return OK; }
API Status cublasSetWorkspace_v2(void*, void*, size_t) { return OK; }
API Status cublasGetMathMode(void* handle, int* mode) { *mode = ((Blas*)handle)->math_mode; return OK; }
API Status cublasSetMathMode(void* handle, int mode) { ((Blas*)handle)->math_mode = mode; return OK; }
API Status cublasGetPointerMode_v2(void* handle, int* mode) { *mode = ((Blas*)handle)->pointer_mode; return OK; }
API Status cublasSetPointerMode_v2(void* handle, int mode) { ((Blas*)handle)->pointer_mode = mode; return OK; }

static Status new_descriptor(void** descriptor) {
  *descriptor = calloc(1, 1024);
  return OK;
}
static Status drop_descriptor(void* descriptor) {
  free(descriptor);
  return OK;
}
API Status cublasLtCreate(void** handle) { return new_descriptor(handle); }
API Status cublasLtDestroy(void* handle) { return drop_descriptor(handle); }
API Status cublasLtMatmulDescCreate(void** it, int, int) { return new_descriptor(it); }
API Status cublasLtMatmulDescDestroy(void* it) { return drop_descriptor(it); }
API Status cublasLtMatmulDescSetAttribute() { return OK; }
API Status cublasLtMatrixLayoutCreate(void** it, int, uint64_t, uint64_t, int64_t) { return new_descriptor(it); }
API Status cublasLtMatrixLayoutDestroy(void* it) { return drop_descriptor(it); }
API Status cublasLtMatrixLayoutSetAttribute() { return OK; }
API Status cublasLtMatmulPreferenceCreate(void** it) { return new_descriptor(it); }
API Status cublasLtMatmulPreferenceDestroy(void* it) { return drop_descriptor(it); }
API Status cublasLtMatmulPreferenceSetAttribute() { return OK; }
struct Heuristic { uint64_t algorithm[8]; size_t workspace_bytes; Status status; float waves; int reserved[4]; };
API Status cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Heuristic* to, int* count) {
  *count = wanted > 0 ? 1 : 0;
  if (wanted > 0) *to = Heuristic{{}, 0, OK, 1.0f, {}};
  return OK;
}
API Status cublasLtMatmul() { kernel_ran(); return OK; }

// ------------------------------------------------------------------ cuDNN, the classic interface
constexpr Status DNN_NOT_SUPPORTED = 3000;
struct Dnn { void* stream; };
API Status cudnnCreate(void** handle) { *handle = new Dnn(); return OK; }
API Status cudnnDestroy(void* handle) { delete (Dnn*)handle; return OK; }
API Status cudnnSetStream(void* handle, void* stream) { ((Dnn*)handle)->stream = stream; return OK; }
API Status cudnnGetStream(void* handle, void** stream) { *stream = ((Dnn*)handle)->stream; return OK; }
#define DESCRIPTOR(KIND)                                                                   \
  API Status cudnnCreate##KIND##Descriptor(void** it) { return new_descriptor(it); } \
  API Status cudnnDestroy##KIND##Descriptor(void* it) { return drop_descriptor(it); }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)
DESCRIPTOR(SpatialTransformer)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
// Batch normalisation through this interface needs a handle of a real device: no workspace and no reserve are known.
API Status cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, size_t* bytes) {
  *bytes = 0;
  return OK;
}
API Status cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* bytes) {
  *bytes = 0;
  return OK;
}
API Status cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes) {
  *bytes = 0;
  return OK;
}
API Status cudnnBatchNormalizationForwardTrainingEx() { kernel_ran(); return OK; }
API Status cudnnBatchNormalizationBackwardEx() { kernel_ran(); return OK; }
API Status cudnnDropoutGetStatesSize(void*, size_t* bytes) { *bytes = 1 << 20; return OK; }

// ------------------------------------------------------------------ cuDNN, the graph interface
namespace dnn {
enum Kind { ENGINE = 2, HEURISTIC = 4, PLAN = 5, DEVICE = 38 };
enum Attribute {
  HEURISTIC_RESULTS = 202, HEURISTIC_DEVICE = 204, CONFIGURED_ENGINE = 300, KNOB_CHOICES = 302,
  CONFIGURED_WORKSPACE = 303, PLAN_HANDLE = 400, PLAN_WORKSPACE = 402, PLAN_DEVICE = 407, GRAPH_HANDLE = 800,
  GRAPH_ENGINES = 802, ENGINE_INDEX = 1301, KNOBS = 1302, NUMERICAL_NOTES = 1303, BEHAVIOR_NOTES = 1305,
  ENGINE_DEVICE = 1307, DEVICE_JSON = 2702,
};
enum Type { HANDLE = 0, BOOLEAN = 2, INT64 = 3, DOUBLE = 5, VOID_POINTER = 6, DESCRIPTOR_POINTER = 15, CHARACTER = 24, FRACTION = 26 };
size_t size_of(int type) {
  switch (type) {
    case HANDLE: case INT64: case DOUBLE: case VOID_POINTER: case DESCRIPTOR_POINTER: return 8;
    case BOOLEAN: case CHARACTER: return 1;
    case FRACTION: return 16;
    default: return 4;
  }
}
constexpr size_t FIRST_WITHOUT_DEVICE = 90800;

struct Library {  // the real one, where it can be asked
  Status (*create)(int, void**) = nullptr;
  Status (*destroy)(void*) = nullptr;
  Status (*finalize)(void*) = nullptr;
  Status (*set)(void*, int, int, int64_t, const void*) = nullptr;
  Status (*get)(void*, int, int, int64_t, int64_t*, void*) = nullptr;
  void* device = nullptr;
  std::map<void*, int> kinds;
  explicit operator bool() const { return device != nullptr; }
};

static Library find_library() {
  Library found;
  void* real = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
  const char* json = text_setting("XMEM_VGPU_CUDNN");
  auto version = real ? (size_t(*)())dlsym(real, "cudnnGetVersion") : nullptr;
  if (!version || version() < FIRST_WITHOUT_DEVICE || !*json) return found;
  found.create = (decltype(found.create))dlsym(real, "cudnnBackendCreateDescriptor");
  found.destroy = (decltype(found.destroy))dlsym(real, "cudnnBackendDestroyDescriptor");
  found.finalize = (decltype(found.finalize))dlsym(real, "cudnnBackendFinalize");
  found.set = (decltype(found.set))dlsym(real, "cudnnBackendSetAttribute");
  found.get = (decltype(found.get))dlsym(real, "cudnnBackendGetAttribute");
  void* device = nullptr;
  bool good = found.create && found.destroy && found.finalize && found.set && found.get &&
              !found.create(DEVICE, &device) &&
              !found.set(device, DEVICE_JSON, CHARACTER, (int64_t)strlen(json) + 1, json) && !found.finalize(device);
  if (good) found.device = device;
  else xmem_vgpu_note_unmodelled("cudnn_device_description");
  return found;
}
static Library& library() {
  static auto* it = new Library(find_library());
  return *it;
}

static bool asks_too_much(void* plan) {  // a limit that perturbs the choice of engines
  static const uint64_t most = number_setting("XMEM_VGPU_WORKSPACE_MOST_BYTES", ~0ull);
  int64_t bytes = 0, count = 0;
  return most != ~0ull && library().get(plan, PLAN_WORKSPACE, INT64, 1, &count, &bytes) == OK && (uint64_t)bytes > most;
}

struct Descriptor { std::map<int, std::pair<int64_t, std::string>> attributes; };  // where there is none to ask

static Status answer_without_library(Descriptor* it, int which, int type, int64_t room, int64_t* count, void* to) {
  auto give = [&](int64_t n, int64_t value) {
    if (count) *count = n;
    if (to && room > 0 && n > 0) *(int64_t*)to = value;
    return OK;
  };
  switch (which) {
    case HEURISTIC_RESULTS: case CONFIGURED_ENGINE: if (count) *count = 1; return OK;
    case GRAPH_ENGINES: return give(1, 1);
    case ENGINE_INDEX: case PLAN_WORKSPACE: case CONFIGURED_WORKSPACE: return give(1, 0);
    case NUMERICAL_NOTES: case BEHAVIOR_NOTES: case KNOBS: case KNOB_CHOICES: return give(0, 0);
    default: break;
  }
  auto known = it->attributes.find(which);
  if (count) *count = known == it->attributes.end() ? 0 : known->second.first;
  if (!to || room <= 0) return OK;
  memset(to, 0, (size_t)room * size_of(type));
  if (known != it->attributes.end())
    memcpy(to, known->second.second.data(), std::min((size_t)room * size_of(type), known->second.second.size()));
  return OK;
}
}  // namespace dnn

API int xmem_vgpu_asks_cudnn() { return dnn::library() ? 1 : 0; }

API Status cudnnBackendCreateDescriptor(int kind, void** descriptor) {
  if (!dnn::library()) {
    *descriptor = new dnn::Descriptor();
    return OK;
  }
  Status status = dnn::library().create(kind, descriptor);
  LOCKED;
  if (status == OK) dnn::library().kinds[*descriptor] = kind;
  return status;
}
API Status cudnnBackendDestroyDescriptor(void* descriptor) {
  if (!dnn::library()) {
    delete (dnn::Descriptor*)descriptor;
    return OK;
  }
  {
    LOCKED;
    dnn::library().kinds.erase(descriptor);
  }
  return dnn::library().destroy(descriptor);
}
API Status cudnnBackendInitialize(void*) { return OK; }
API Status cudnnBackendFinalize(void* descriptor) {
  auto& real = dnn::library();
  if (!real) return OK;
  int kind = 0;
  {
    LOCKED;
    auto known = real.kinds.find(descriptor);
    if (known != real.kinds.end()) kind = known->second;
  }
  int which = kind == dnn::HEURISTIC ? dnn::HEURISTIC_DEVICE : kind == dnn::PLAN ? dnn::PLAN_DEVICE
              : kind == dnn::ENGINE  ? dnn::ENGINE_DEVICE : 0;
  if (which) real.set(descriptor, which, dnn::DESCRIPTOR_POINTER, 1, &real.device);
  Status status = real.finalize(descriptor);
  if (status == OK && kind == dnn::PLAN && dnn::asks_too_much(descriptor)) return DNN_NOT_SUPPORTED;
  return status;
}
API Status cudnnBackendSetAttribute(void* descriptor, int which, int type, int64_t count, const void* from) {
  if (dnn::library()) {
    if (which == dnn::GRAPH_HANDLE || which == dnn::PLAN_HANDLE) return OK;  // there is no handle of a device
    return dnn::library().set(descriptor, which, type, count, from);
  }
  size_t bytes = from && count > 0 ? (size_t)count * dnn::size_of(type) : 0;
  ((dnn::Descriptor*)descriptor)->attributes[which] = {count, std::string((const char*)from, bytes)};
  return OK;
}
API Status cudnnBackendGetAttribute(void* descriptor, int which, int type, int64_t room, int64_t* count, void* to) {
  if (dnn::library()) return dnn::library().get(descriptor, which, type, room, count, to);
  return dnn::answer_without_library((dnn::Descriptor*)descriptor, which, type, room, count, to);
}
// cudnn.benchmark times every plan: the first is the quickest, as heuristics say, or the one with the most workspace.
std::atomic<uint64_t> pretended_us{0};
static std::atomic<uint64_t> executed{0};
API uint64_t xmem_vgpu_cudnn_calls() { return executed; }
static uint64_t time_of(void* plan) {
  static const bool worst = !strcmp(text_setting("XMEM_VGPU_BENCHMARK"), "worst");
  constexpr uint64_t MOST_US = 16'000'000;  // as milliseconds in a float: exact to a microsecond
  uint64_t nth = ++executed;
  int64_t bytes = 0, count = 0;
  if (!worst || !dnn::library()) return 1000 + nth % MOST_US;
  if (dnn::library().get(plan, dnn::PLAN_WORKSPACE, dnn::INT64, 1, &count, &bytes) != OK) bytes = 0;
  return MOST_US + nth % 1000 - std::min((uint64_t)bytes >> 10, MOST_US - 1000);
}
API Status cudnnBackendExecute(void*, void* plan, void*) {
  pretended_us += time_of(plan);
  kernel_ran();
  return OK;
}
API Status cudnnBackendPopulateCudaGraph(void*, void*, void*, void*) { return OK; }
API Status cudnnBackendUpdateCudaGraph(void*, void*, void*, void*) { return OK; }
