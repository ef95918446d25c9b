// Streams, events, stream capture and graphs: everything has happened as soon as it is asked for.
#include <sys/mman.h>

#include <cstring>
#include <ctime>
#include <vector>

#include "card.h"

struct UserObject { void* pointer; void (*destroy)(void*); int references; };
struct Graph { std::vector<UserObject*> objects; };
struct Stream { unsigned long long number, capture; int priority; unsigned flags; bool origin; int device; Graph* graph; };
struct Event { timespec at; unsigned long long capture; Graph* graph; uint64_t pretended_us; };

constexpr unsigned MOST_STREAMS = 65536;
static unsigned stream_count = 0;
static unsigned long long next_capture = 1;
static Stream default_streams[MOST_DEVICES], thread_streams[MOST_DEVICES];

static Stream* streams() {  // handles grow in the order of creation, since PyTorch sorts blocks by them
  static auto* all = (Stream*)mmap((void*)0x100000000000ull, MOST_STREAMS * sizeof(Stream), PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return all;
}

static Stream* stream_of(void* handle) {
  if ((uint64_t)handle <= 1) return &default_streams[current_device];
  if ((uint64_t)handle == 2) return &thread_streams[current_device];
  return (Stream*)handle;
}

void finish_events() {}

API Status cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  LOCKED;
  if (stream_count == MOST_STREAMS) return failed(OUT_OF_MEMORY);
  Stream* made = &streams()[stream_count++];
  *made = {stream_count, 0, priority, flags, false, current_device, nullptr};
  *stream = made;
  return OK;
}
API Status cudaStreamCreateWithFlags(void** stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API Status cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API Status cudaStreamDestroy(void*) { return OK; }
API Status cudaStreamGetPriority(void* stream, int* priority) { *priority = stream_of(stream)->priority; return OK; }
API Status cudaStreamGetFlags(void* stream, unsigned* flags) { *flags = stream_of(stream)->flags; return OK; }
API Status cudaStreamGetId(void* stream, unsigned long long* id) { *id = stream_of(stream)->number; return OK; }
API Status cudaStreamGetDevice(void* stream, int* device) { *device = (uint64_t)stream > 2 ? stream_of(stream)->device : current_device; return OK; }
API Status cudaStreamQuery(void*) { return OK; }
API Status cudaStreamSynchronize(void*) { return OK; }
API Status cudaStreamAddCallback(void* stream, void (*call)(void*, Status, void*), void* data, unsigned) {
  call(stream, OK, data);
  return OK;
}
API Status cudaLaunchHostFunc(void*, void (*call)(void*), void* data) {
  call(data);
  return OK;
}
API Status cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  LOCKED;
  Stream* own = stream_of(stream);
  auto* waited = (Event*)event;
  if (waited && waited->capture && !own->capture) {  // the stream joins the capture, if that still goes on
    for (unsigned n = 0; n < stream_count; n++)
      if (streams()[n].capture == waited->capture) {
        own->capture = waited->capture, own->graph = waited->graph, own->origin = false;
        break;
      }
  }
  return OK;
}

// ------------------------------------------------------------------ events
API Status cudaEventCreateWithFlags(void** event, unsigned) { *event = new Event(); return OK; }
API Status cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
API Status cudaEventDestroy(void* event) { delete (Event*)event; return OK; }
API Status cudaEventRecord(void* event, void* stream) {
  LOCKED;
  auto* own = (Event*)event;
  own->capture = stream_of(stream)->capture;
  own->graph = stream_of(stream)->graph;
  clock_gettime(CLOCK_MONOTONIC, &own->at);
  own->pretended_us = pretended_us;
  return OK;
}
API Status cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
API Status cudaEventQuery(void*) { return OK; }
API Status cudaEventSynchronize(void*) { return OK; }
API Status cudaEventElapsedTime(float* ms, void* from, void* to) {
  timespec a = ((Event*)from)->at, b = ((Event*)to)->at;
  int64_t pretended = (int64_t)(((Event*)to)->pretended_us - ((Event*)from)->pretended_us);
  if (pretended) *ms = (float)((double)pretended / 1e3);
  else *ms = (float)((double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
  return OK;
}
API Status cudaIpcGetMemHandle(void*, void*) { return failed(NOT_SUPPORTED); }
struct IpcHandle { char bytes[64]; };
API Status cudaIpcOpenMemHandle(void**, IpcHandle, unsigned) { return failed(NOT_SUPPORTED); }
API Status cudaIpcCloseMemHandle(void*) { return failed(NOT_SUPPORTED); }
API Status cudaIpcGetEventHandle(void*, void*) { return failed(NOT_SUPPORTED); }
API Status cudaIpcOpenEventHandle(void**, IpcHandle) { return failed(NOT_SUPPORTED); }

// ------------------------------------------------------------------ capture
static char any_node[64];

API Status cudaStreamIsCapturing(void* stream, int* status) {
  LOCKED;
  *status = stream_of(stream)->capture ? 1 : 0;
  return OK;
}
static Status capture_info(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes, size_t* count) {
  LOCKED;
  static const void* one[1] = {any_node};
  Stream* own = stream_of(stream);
  if (status) *status = own->capture ? 1 : 0;
  if (count) *count = 0;
  if (!own->capture) return OK;
  if (id) *id = own->capture;
  if (graph) *graph = own->graph;
  if (nodes) *nodes = one;
  return OK;
}
API Status cudaStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes,
                                       const void** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return capture_info(stream, status, id, graph, nodes, count);
}
API Status cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes,
                                       size_t* count) {
  return capture_info(stream, status, id, graph, nodes, count);
}
#if CUDA_MAJOR >= 13
API Status cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes,
                                    const void** edges, size_t* count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
#else
API Status cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
  return capture_info(stream, status, id, nullptr, nullptr, nullptr);
}
#endif
API Status cudaStreamBeginCaptureToGraph(void* stream, void* graph, const void*, const void*, size_t, int) {
  LOCKED;
  Stream* own = stream_of(stream);
  own->capture = next_capture++;
  own->origin = true;
  own->graph = graph ? (Graph*)graph : new Graph();
  return OK;
}
API Status cudaStreamBeginCapture(void* stream, int mode) {
  return cudaStreamBeginCaptureToGraph(stream, nullptr, nullptr, nullptr, 0, mode);
}
API Status cudaStreamEndCapture(void* stream, void** graph) {
  LOCKED;
  Stream* own = stream_of(stream);
  unsigned long long capture = own->capture;
  if (!capture) return failed(INVALID_VALUE);
  if (graph) *graph = own->graph;
  for (unsigned n = 0; n < stream_count; n++)
    if (streams()[n].capture == capture) streams()[n].capture = 0, streams()[n].graph = nullptr;
  own->capture = 0, own->graph = nullptr;
  return OK;
}
API Status cudaStreamUpdateCaptureDependencies(void*, void*, const void*, size_t, unsigned) { return OK; }
static thread_local int capture_mode = 0;
API Status cudaThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return OK;
}

// ------------------------------------------------------------------ graphs
static void drop(UserObject* object, int references) {
  object->references -= references;
  if (object->references > 0) return;
  if (object->destroy) object->destroy(object->pointer);
  delete object;
}
static Status drop_graph(void* graph) {
  LOCKED;
  if (!graph) return OK;
  for (UserObject* object : ((Graph*)graph)->objects) drop(object, 1);
  delete (Graph*)graph;
  return OK;
}
API Status cudaGraphCreate(void** graph, unsigned) { *graph = new Graph(); return OK; }
API Status cudaGraphDestroy(void* graph) { return drop_graph(graph); }
API Status cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  LOCKED;
  auto* made = new Graph(*(Graph*)graph);
  for (UserObject* object : made->objects) object->references++;
  *executable = made;
  return OK;
}
API Status cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
API Status cudaGraphExecDestroy(void* executable) { return drop_graph(executable); }
API Status cudaGraphLaunch(void*, void*) { kernel_ran(); return OK; }
API Status cudaGraphUpload(void*, void*) { return OK; }
API Status cudaGraphGetNodes(void*, void** nodes, size_t* count) {
  if (nodes && *count) nodes[0] = any_node;
  *count = 1;
  return OK;
}
API Status cudaGraphAddNode(void** node, void*, const void*, const void*, size_t, void*) { *node = any_node; return OK; }
API Status cudaGraphNodeGetDependencies(void*, void**, void*, size_t* count) { *count = 0; return OK; }
API Status cudaGraphConditionalHandleCreate(unsigned long long* handle, void*, unsigned, unsigned) { *handle = 1; return OK; }
API Status cudaGraphDebugDotPrint(void*, const char*, unsigned) { return OK; }
API Status cudaUserObjectCreate(void** object, void* pointer, void (*destroy)(void*), unsigned references, unsigned) {
  *object = new UserObject{pointer, destroy, (int)references};
  return OK;
}
API Status cudaUserObjectRelease(void* object, unsigned count) {
  LOCKED;
  drop((UserObject*)object, (int)count);
  return OK;
}
API Status cudaGraphRetainUserObject(void* graph, void* object, unsigned count, unsigned flags) {
  LOCKED;
  constexpr unsigned MOVE = 1;
  if (!(flags & MOVE)) ((UserObject*)object)->references += (int)count;
  for (unsigned n = 0; n < count; n++) ((Graph*)graph)->objects.push_back((UserObject*)object);
  return OK;
}

// ------------------------------------------------------------------ the same by the driver's names
static char context[64];
API Status cuCtxGetCurrent(void** it) { *it = context; return OK; }
API Status cuCtxSetCurrent(void*) { return OK; }
API Status cuCtxGetDevice(int* device) { *device = current_device; return OK; }
API Status cuCtxPushCurrent_v2(void*) { return OK; }
API Status cuCtxPopCurrent_v2(void** it) { if (it) *it = context; return OK; }
API Status cuCtxPushCurrent(void*) { return OK; }
API Status cuCtxPopCurrent(void** it) { return cuCtxPopCurrent_v2(it); }
API Status cuCtxSynchronize() { return OK; }
API Status cuCtxGetLimit(size_t* value, int) { *value = 1024; return OK; }
API Status cuCtxSetLimit(int, size_t) { return OK; }
API Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
API Status cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return OK;
}
API Status cuDevicePrimaryCtxRetain(void** it, int) { *it = context; return OK; }
API Status cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API Status cuStreamGetCtx(void*, void** it) { *it = context; return OK; }
API Status cuStreamSynchronize(void*) { return OK; }
API Status cuStreamWriteValue32_v2(void*, uint64_t, unsigned, unsigned) { return OK; }
API Status cuLogsRegisterCallback() { return OK; }
API Status cuLogsUnregisterCallback() { return OK; }
