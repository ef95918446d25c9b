// The state of the virtual cards: settings from the environment, memory in use, and what all files of the driver share.
#pragma once
#include <atomic>
#include <mutex>

#include "cuda_abi.h"

constexpr uint64_t MIB = 1ull << 20;
constexpr uint64_t GRANULARITY = 2 * MIB;  // what cudaMalloc and cuMemCreate take at least, and in multiples of
constexpr int MOST_DEVICES = 16;

struct Card {
  char name[256];
  uint64_t total_bytes, taken_bytes;  // taken: context, kernels, other processes: never free
  int devices, major, minor, multiprocessors, sm_clock_khz, memory_clock_khz, bus_bits;
  int l2_bytes, threads_per_sm, blocks_per_sm, shared_per_sm, shared_per_block_optin, shared_reserved;
  uint64_t communicator_bytes;  // per NCCL communicator, outside the allocator
};

struct Usage { uint64_t used_bytes, peak_bytes; };

extern std::recursive_mutex driver_lock;
extern thread_local int current_device;
extern std::atomic<uint64_t> launches;
extern std::atomic<uint64_t> pretended_us;  // what cuDNN's calls are said to have taken

const Card& card();
Usage& usage(int device);
bool take_memory(int device, uint64_t bytes);
void give_memory(int device, uint64_t bytes);
uint64_t free_memory(int device);
uint64_t number_setting(const char* name, uint64_t otherwise);
const char* text_setting(const char* name);
inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

bool is_device_memory(const void* pointer);
Status allocate(void** pointer, size_t bytes);
Status release(void* pointer);
void copy(void* target, const void* source, size_t bytes);
void fill(void* target, int value, size_t bytes);
void kernel_ran();  // whatever was known of device memory may have been overwritten
void finish_events();
Status failed(Status status);  // keeps it for cudaGetLastError
API void xmem_vgpu_note_unmodelled(const char* name);

#define LOCKED std::lock_guard<std::recursive_mutex> guard(driver_lock)
