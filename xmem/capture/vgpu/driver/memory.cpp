// Device memory: address space, physical memory, virtual memory management, pinned host memory, bounded copies.
//
// Device memory is reserved and never touched. What was copied from the host is remembered only until the next kernel
// runs; whatever else is read back is zero.
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "card.h"

constexpr uint64_t PLAIN_BASE = 0x300000000000ull, PLAIN_SPAN = 4ull << 40;
constexpr uint64_t MAPPED_BASE = 0x200000000000ull, MAPPED_SPAN = 16ull << 40;
constexpr size_t REMEMBERED_MOST = 1 << 20;

struct Piece { uint64_t bytes, requested; int device; };
struct Physical { uint64_t bytes; int references, device; };
struct Mapping { uint64_t bytes, handle; };

struct Space {
  std::map<uint64_t, uint64_t> holes;
  void open(uint64_t base, uint64_t span) {
    void* got = mmap((void*)base, span, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != (void*)base) {
      fprintf(stderr, "xmem: the virtual GPU cannot reserve its address space: %s\n", strerror(errno));
      abort();
    }
    holes[base] = span;
  }
  uint64_t take(uint64_t bytes, uint64_t alignment, bool from_the_top) {
    auto fits = [&](uint64_t at, uint64_t size) { return round_up(at, alignment) + bytes <= at + size; };
    auto found = holes.end();
    for (auto hole = holes.begin(); hole != holes.end(); ++hole)
      if (fits(hole->first, hole->second)) {
        found = hole;
        if (!from_the_top) break;
      }
    if (found == holes.end()) return 0;
    uint64_t start = found->first, end = found->first + found->second;
    uint64_t at = from_the_top ? (end - bytes) / alignment * alignment : round_up(start, alignment);
    holes.erase(found);
    if (at > start) holes[start] = at - start;
    if (at + bytes < end) holes[at + bytes] = end - at - bytes;
    return at;
  }
  void give(uint64_t at, uint64_t bytes) {
    auto own = holes.emplace(at, bytes).first;
    auto next = std::next(own);
    if (next != holes.end() && at + own->second == next->first) own->second += next->second, holes.erase(next);
    if (own == holes.begin()) return;
    auto before = std::prev(own);
    if (before->first + before->second == at) before->second += own->second, holes.erase(own);
  }
};

struct Memory {
  Space plain, mapped;
  bool from_the_top = !strcmp(text_setting("XMEM_VGPU_ADDRESSES"), "down");
  std::map<uint64_t, Piece> pieces;
  std::map<uint64_t, Mapping> mappings;
  std::map<uint64_t, Physical> physical;
  uint64_t next_handle = 1;
  std::map<uint64_t, uint64_t> pinned;
  std::map<uint64_t, std::string> remembered;
  Memory() {
    plain.open(PLAIN_BASE, PLAIN_SPAN);
    mapped.open(MAPPED_BASE, MAPPED_SPAN);
  }
};

static Memory& memory() {
  static auto* it = new Memory();
  return *it;
}
static std::atomic<bool> remembers_something{false};

bool is_device_memory(const void* pointer) {
  uint64_t at = (uint64_t)pointer;
  return (at >= PLAIN_BASE && at < PLAIN_BASE + PLAIN_SPAN) || (at >= MAPPED_BASE && at < MAPPED_BASE + MAPPED_SPAN);
}

template <class Map> static auto around(Map& map, uint64_t at) {  // the entry that holds this address, or end
  auto entry = map.upper_bound(at);
  if (entry == map.begin()) return map.end();
  --entry;
  return entry;
}

// ------------------------------------------------------------------ cudaMalloc
Status allocate(void** pointer, size_t bytes) {
  LOCKED;
  *pointer = nullptr;
  if (bytes == 0) return OK;
  uint64_t whole = round_up(bytes, GRANULARITY);
  if (!take_memory(current_device, whole)) return failed(OUT_OF_MEMORY);
  uint64_t at = memory().plain.take(whole, GRANULARITY, memory().from_the_top);
  if (!at) {
    give_memory(current_device, whole);
    return failed(OUT_OF_MEMORY);
  }
  memory().pieces[at] = {whole, bytes, current_device};
  *pointer = (void*)at;
  return OK;
}

Status release(void* pointer) {
  LOCKED;
  if (!pointer) return OK;
  auto piece = memory().pieces.find((uint64_t)pointer);
  if (piece == memory().pieces.end()) return failed(INVALID_VALUE);
  give_memory(piece->second.device, piece->second.bytes);
  memory().plain.give(piece->first, piece->second.bytes);
  memory().pieces.erase(piece);
  finish_events();  // cudaFree waits for the device
  return OK;
}

API Status cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
API Status cudaFree(void* pointer) { return release(pointer); }
API Status cudaMallocAsync(void** pointer, size_t bytes, void*) { return allocate(pointer, bytes); }
API Status cudaFreeAsync(void* pointer, void*) { return release(pointer); }
API Status cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes); }
API Status cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  LOCKED;
  if (total_bytes) *total_bytes = card().total_bytes;
  if (free_bytes) *free_bytes = free_memory(current_device);
  return OK;
}
API Status cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) { return cudaMemGetInfo(free_bytes, total_bytes); }
API Status cuMemAlloc_v2(uint64_t* pointer, size_t bytes) { return allocate((void**)pointer, bytes); }
API Status cuMemFree_v2(uint64_t pointer) { return release((void*)pointer); }
API Status cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t at) {
  LOCKED;
  auto piece = around(memory().pieces, at);
  if (piece != memory().pieces.end() && at < piece->first + piece->second.bytes) {
    if (base) *base = piece->first;
    if (bytes) *bytes = piece->second.requested;
    return OK;
  }
  auto mapping = around(memory().mappings, at);
  if (mapping == memory().mappings.end() || at >= mapping->first + mapping->second.bytes) return NOT_FOUND;
  if (base) *base = mapping->first;
  if (bytes) *bytes = mapping->second.bytes;
  return OK;
}

// ------------------------------------------------------------------ virtual memory management
static void drop_physical(uint64_t handle) {
  auto it = memory().physical.find(handle);
  if (it == memory().physical.end() || --it->second.references > 0) return;
  give_memory(it->second.device, it->second.bytes);
  memory().physical.erase(it);
}

API Status cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { *bytes = GRANULARITY; return OK; }
API Status cuMemAddressReserve(uint64_t* pointer, size_t bytes, size_t alignment, uint64_t, unsigned long long) {
  LOCKED;
  uint64_t unit = alignment > GRANULARITY ? alignment : GRANULARITY;
  *pointer = memory().mapped.take(round_up(bytes, GRANULARITY), unit, false);
  return *pointer ? OK : OUT_OF_MEMORY;
}
API Status cuMemAddressFree(uint64_t pointer, size_t bytes) {
  LOCKED;
  memory().mapped.give(pointer, round_up(bytes, GRANULARITY));
  return OK;
}
API Status cuMemCreate(uint64_t* handle, size_t bytes, const AllocationProperties* how, unsigned long long) {
  LOCKED;
  int device = how && how->locationType == 1 ? how->locationId : current_device;
  if (bytes % GRANULARITY || device < 0 || device >= card().devices) return INVALID_VALUE;
  if (!take_memory(device, bytes)) return OUT_OF_MEMORY;
  *handle = memory().next_handle++;
  memory().physical[*handle] = {bytes, 1, device};
  return OK;
}
API Status cuMemRelease(uint64_t handle) {
  LOCKED;
  if (!memory().physical.count(handle)) return INVALID_VALUE;
  drop_physical(handle);
  return OK;
}
API Status cuMemMap(uint64_t pointer, size_t bytes, size_t, uint64_t handle, unsigned long long) {
  LOCKED;
  auto it = memory().physical.find(handle);
  if (it == memory().physical.end()) return INVALID_VALUE;
  it->second.references++;
  memory().mappings[pointer] = {bytes, handle};
  return OK;
}
API Status cuMemUnmap(uint64_t pointer, size_t bytes) {
  LOCKED;
  auto it = memory().mappings.lower_bound(pointer);
  while (it != memory().mappings.end() && it->first < pointer + bytes) {
    drop_physical(it->second.handle);
    it = memory().mappings.erase(it);
  }
  finish_events();
  return OK;
}
API Status cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return OK; }
API Status cuMemRetainAllocationHandle(uint64_t* handle, void* pointer) {
  LOCKED;
  auto mapping = around(memory().mappings, (uint64_t)pointer);
  if (mapping == memory().mappings.end()) return INVALID_VALUE;
  *handle = mapping->second.handle;
  memory().physical[*handle].references++;
  return OK;
}
API Status cuMemGetAllocationPropertiesFromHandle(AllocationProperties* how, uint64_t handle) {
  LOCKED;
  memset(how, 0, sizeof *how);
  auto it = memory().physical.find(handle);
  how->type = how->locationType = 1;
  how->locationId = it == memory().physical.end() ? 0 : it->second.device;
  return OK;
}
API Status cuMemExportToShareableHandle(void*, uint64_t, int, unsigned long long) { return NOT_SUPPORTED; }
API Status cuMemImportFromShareableHandle(uint64_t*, void*, int) { return NOT_SUPPORTED; }

// ------------------------------------------------------------------ host memory
API Status cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  LOCKED;
  uint64_t whole = round_up(bytes ? bytes : 1, 4096);
  void* got = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return failed(OUT_OF_MEMORY);
  memory().pinned[(uint64_t)got] = whole;
  *pointer = got;
  return OK;
}
API Status cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API Status cudaFreeHost(void* pointer) {
  LOCKED;
  auto it = memory().pinned.find((uint64_t)pointer);
  if (it == memory().pinned.end()) return pointer ? failed(INVALID_VALUE) : OK;
  munmap(pointer, it->second);
  memory().pinned.erase(it);
  return OK;
}
API Status cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  LOCKED;
  memory().pinned[(uint64_t)pointer] = bytes;
  return OK;
}
API Status cudaHostUnregister(void* pointer) {
  LOCKED;
  memory().pinned.erase((uint64_t)pointer);
  return OK;
}
API Status cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return OK; }
API Status cudaPointerGetAttributes(PointerAttributes* to, const void* pointer) {
  LOCKED;
  memset(to, 0, sizeof *to);
  uint64_t at = (uint64_t)pointer;
  if (is_device_memory(pointer)) {
    auto piece = around(memory().pieces, at);
    auto mapping = around(memory().mappings, at);
    to->type = 2;
    to->devicePointer = (void*)pointer;
    if (piece != memory().pieces.end() && at < piece->first + piece->second.bytes) to->device = piece->second.device;
    else if (mapping != memory().mappings.end()) to->device = memory().physical[mapping->second.handle].device;
    return OK;
  }
  auto host = around(memory().pinned, at);
  bool is_pinned = host != memory().pinned.end() && at < host->first + host->second;
  to->type = is_pinned ? 1 : 0;
  to->device = is_pinned ? 0 : -1;
  to->hostPointer = (void*)pointer;
  to->devicePointer = is_pinned ? (void*)pointer : nullptr;
  return OK;
}
API Status cuPointerGetAttribute(void* value, int which, uint64_t pointer) {
  bool device = is_device_memory((void*)pointer);
  switch (which) {
    case 1: *(void**)value = (void*)0x1000; return OK;                         // context
    case 2: *(unsigned*)value = device ? 2 : 1; return OK;                     // memory type
    case 3: *(uint64_t*)value = pointer; return device ? OK : INVALID_VALUE;   // device pointer
    case 9: {                                                                  // ordinal
      PointerAttributes about;
      cudaPointerGetAttributes(&about, (void*)pointer);
      *(int*)value = about.device;
      return OK;
    }
    default: *(unsigned*)value = 0; return OK;
  }
}

// ------------------------------------------------------------------ copies
void kernel_ran() {
  launches++;
  if (!remembers_something) return;
  LOCKED;
  memory().remembered.clear();
  remembers_something = false;
}

API void xmem_vgpu_kernel_ran() { kernel_ran(); }

static void forget(uint64_t at, size_t bytes) {
  auto& known = memory().remembered;
  auto it = around(known, at);
  if (it == known.end()) it = known.begin();
  while (it != known.end() && it->first < at + bytes) {
    if (it->first + it->second.size() > at) it = known.erase(it);
    else ++it;
  }
}

static void remember(uint64_t at, const void* bytes, size_t count) {
  forget(at, count);
  if (count > REMEMBERED_MOST) return;
  memory().remembered[at].assign((const char*)bytes, count);
  remembers_something = true;
}

static const char* recall(uint64_t at, size_t bytes) {
  auto it = around(memory().remembered, at);
  if (it == memory().remembered.end() || at + bytes > it->first + it->second.size()) return nullptr;
  return it->second.data() + (at - it->first);
}

void copy(void* target, const void* source, size_t bytes) {
  if (!bytes || !target || !source) return;
  LOCKED;
  bool to_device = is_device_memory(target), from_device = is_device_memory(source);
  if (!to_device && !from_device) {
    memmove(target, source, bytes);
  } else if (!from_device) {
    remember((uint64_t)target, source, bytes);
  } else {
    const char* known = recall((uint64_t)source, bytes);
    if (!to_device && known) memcpy(target, known, bytes);
    else if (!to_device) memset(target, 0, bytes);
    else if (known) remember((uint64_t)target, std::string(known, bytes).data(), bytes);
    else forget((uint64_t)target, bytes);
  }
}

void fill(void* target, int value, size_t bytes) {
  if (!target || !bytes) return;
  LOCKED;
  if (!is_device_memory(target)) memset(target, value, bytes);
  else if (bytes <= REMEMBERED_MOST) remember((uint64_t)target, std::string(bytes, (char)value).data(), bytes);
  else forget((uint64_t)target, bytes);
}

API Status cudaMemcpy(void* target, const void* source, size_t bytes, int) {
  copy(target, source, bytes);
  finish_events();
  return OK;
}
API Status cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, void*) { copy(target, source, bytes); return OK; }
API Status cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, void*) { copy(target, source, bytes); return OK; }
API Status cudaMemcpyPeer(void* target, int, const void* source, int, size_t bytes) { copy(target, source, bytes); return OK; }
API Status cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                             size_t height, int, void*) {
  for (size_t row = 0; row < height; row++)
    copy((char*)target + row * target_pitch, (const char*)source + row * source_pitch, width);
  return OK;
}
API Status cudaMemset(void* target, int value, size_t bytes) { fill(target, value, bytes); return OK; }
API Status cudaMemsetAsync(void* target, int value, size_t bytes, void*) { fill(target, value, bytes); return OK; }
API Status cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return OK; }
API Status cudaMemcpyToSymbolAsync(const void*, const void*, size_t, size_t, int, void*) { return OK; }
API Status cudaMemcpyFromSymbol(void* target, const void*, size_t bytes, size_t, int) { memset(target, 0, bytes); return OK; }
API Status cuMemsetD8Async(uint64_t target, unsigned char value, size_t bytes, void*) { fill((void*)target, value, bytes); return OK; }
API Status cuMemsetD32Async(uint64_t target, unsigned value, size_t count, void*) {
  LOCKED;
  if (value == 0) fill((void*)target, 0, count * 4);
  else forget(target, count * 4);
  return OK;
}
API Status cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t bytes) { copy((void*)target, source, bytes); return OK; }
API Status cuMemcpyDtoH_v2(void* target, uint64_t source, size_t bytes) { copy(target, (void*)source, bytes); return OK; }
API Status cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void*) { copy((void*)target, source, bytes); return OK; }
API Status cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t bytes, void*) { copy(target, (void*)source, bytes); return OK; }
API Status cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void*) { copy((void*)target, (void*)source, bytes); return OK; }

// ------------------------------------------------------------------ pools of cudaMallocAsync: accepted, not modelled
static char pool_place[64];
API Status cudaDeviceGetDefaultMemPool(void** pool, int) { *pool = pool_place; return OK; }
API Status cudaMemPoolGetAttribute(void*, int, uint64_t* value) { *value = usage(current_device).used_bytes; return OK; }
API Status cudaMemPoolSetAttribute(void*, int, void*) { return OK; }
API Status cudaMemPoolSetAccess(void*, const void*, size_t) { return OK; }
API Status cudaMemPoolTrimTo(void*, size_t) { return OK; }
API Status cudaDeviceGetGraphMemAttribute(int, int, uint64_t* value) { *value = 0; return OK; }
API Status cudaDeviceSetGraphMemAttribute(int, int, void*) { return OK; }
