// NCCL: communicators that move nothing. Every rank is taken to hold what this one holds, so that start-up checks agree.
#include <cstring>

#include "card.h"

struct Communicator { int ranks, rank, device; uint64_t bytes; };
struct UniqueId { char bytes[128]; };

static uint64_t in_communicators[MOST_DEVICES];
API uint64_t xmem_vgpu_communicators(int device) { return in_communicators[device]; }

static Status open_communicator(void** made, int ranks, int rank) {
  LOCKED;
  uint64_t bytes = ranks > 1 ? card().communicator_bytes : 0;
  if (!take_memory(current_device, bytes)) return 1;  // ncclUnhandledCudaError
  in_communicators[current_device] += bytes;
  *made = new Communicator{ranks, rank, current_device, bytes};
  return OK;
}
static size_t size_of(int type) {  // ncclDataType_t
  switch (type) {
    case 0: case 1: case 10: case 11: return 1;
    case 6: case 9: return 2;
    case 4: case 5: case 8: return 8;
    default: return 4;
  }
}

API Status ncclGetVersion(int* version) { *version = 22000; return OK; }
API Status ncclGetUniqueId(UniqueId* id) { memset(id, 7, sizeof *id); return OK; }
API Status ncclCommGetUniqueId(void*, UniqueId* id) { return ncclGetUniqueId(id); }
API Status ncclCommInitRank(void** made, int ranks, UniqueId, int rank) { return open_communicator(made, ranks, rank); }
API Status ncclCommInitRankConfig(void** made, int ranks, UniqueId, int rank, void*) { return open_communicator(made, ranks, rank); }
API Status ncclCommInitRankScalable(void** made, int ranks, int rank, int, void*, void*) { return open_communicator(made, ranks, rank); }
API Status ncclCommInitAll(void** made, int count, const int*) {
  for (int n = 0; n < count; n++) open_communicator(&made[n], count, n);
  return OK;
}
API Status ncclCommSplit(void* from, int color, int, void** made, void*) {
  *made = nullptr;
  return color < 0 ? OK : open_communicator(made, ((Communicator*)from)->ranks, ((Communicator*)from)->rank);
}
static Status close_communicator(void* it) {
  LOCKED;
  if (!it) return OK;
  give_memory(((Communicator*)it)->device, ((Communicator*)it)->bytes);
  in_communicators[((Communicator*)it)->device] -= ((Communicator*)it)->bytes;
  delete (Communicator*)it;
  return OK;
}
API Status ncclCommDestroy(void* it) { return close_communicator(it); }
API Status ncclCommAbort(void* it) { return close_communicator(it); }
API Status ncclCommFinalize(void*) { return OK; }
API Status ncclCommCount(void* it, int* count) { *count = ((Communicator*)it)->ranks; return OK; }
API Status ncclCommUserRank(void* it, int* rank) { *rank = ((Communicator*)it)->rank; return OK; }
API Status ncclCommCuDevice(void* it, int* device) { *device = ((Communicator*)it)->device; return OK; }
API Status ncclCommGetAsyncError(void*, int* status) { *status = OK; return OK; }
API const char* ncclGetErrorString(int) { return "answered by the virtual GPU"; }
API const char* ncclGetLastError(void*) { return ""; }
API Status ncclMemAlloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
API Status ncclMemFree(void* pointer) { return release(pointer); }
API Status ncclCommRegister(void*, void*, size_t, void** handle) { *handle = (void*)1; return OK; }
API Status ncclCommDeregister(void*, void*) { return OK; }
API Status ncclCommWindowRegister(void*, void*, size_t, void** window, int) { *window = nullptr; return OK; }
API Status ncclCommWindowDeregister(void*, void*) { return OK; }
API Status ncclRedOpCreatePreMulSum(int* op, void*, int, int, void*) { *op = 5; return OK; }
API Status ncclRedOpDestroy(int, void*) { return OK; }
API Status ncclGroupStart() { return OK; }
API Status ncclGroupEnd() { return OK; }

API Status ncclAllGather(const void* from, void* to, size_t count, int type, void* it, void*) {
  size_t bytes = count * size_of(type);
  for (int rank = 0; rank < ((Communicator*)it)->ranks; rank++) copy((char*)to + (size_t)rank * bytes, from, bytes);
  return OK;
}
API Status ncclBroadcast(const void* from, void* to, size_t count, int type, int, void*, void*) {
  if (from != to) copy(to, from, count * size_of(type));
  return OK;
}
API Status ncclBcast(void*, size_t, int, int, void*, void*) { return OK; }
API Status ncclAllReduce() { kernel_ran(); return OK; }
API Status ncclReduce() { kernel_ran(); return OK; }
API Status ncclReduceScatter() { kernel_ran(); return OK; }
API Status ncclSend() { kernel_ran(); return OK; }
API Status ncclRecv() { kernel_ran(); return OK; }
API Status ncclAlltoAll() { kernel_ran(); return OK; }
API Status ncclGather() { kernel_ran(); return OK; }
