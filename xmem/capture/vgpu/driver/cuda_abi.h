// The few types of CUDA's binary interface that the virtual driver needs, declared here so that no CUDA header is.
// Layouts as in CUDA 12.4 and 13.0 (cudaDeviceProp differs between the two); opaque handles are plain pointers.
#pragma once
#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))
#ifndef CUDA_MAJOR
#define CUDA_MAJOR 13
#endif

typedef int Status;  // cudaError_t, CUresult, and the status of the math libraries: 0 is success everywhere
enum : int {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  NOT_FOUND = 500,
  NOT_READY = 600,
  NOT_SUPPORTED = 801,
};

struct Dim3 { unsigned x, y, z; };

struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if CUDA_MAJOR < 13
  int clockRate;
#endif
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
#if CUDA_MAJOR < 13
  int deviceOverlap;
#endif
  int multiProcessorCount;
#if CUDA_MAJOR < 13
  int kernelExecTimeoutEnabled;
#endif
  int integrated, canMapHostMemory;
#if CUDA_MAJOR < 13
  int computeMode;
#endif
  int maxTexture1D, maxTexture1DMipmap;
#if CUDA_MAJOR < 13
  int maxTexture1DLinear;
#endif
  int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3];
  int maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3];
  int maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2];
  int maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount;
  int unifiedAddressing;
#if CUDA_MAJOR < 13
  int memoryClockRate;
#endif
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if CUDA_MAJOR < 13
  int singleToDoublePrecisionPerfRatio;
#endif
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported;
  int canUseHostPointerForRegisteredMem, cooperativeLaunch;
#if CUDA_MAJOR < 13
  int cooperativeMultiDeviceLaunch;
#endif
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned memoryPoolSupportedHandleTypes;
  int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
#if CUDA_MAJOR < 13
  int reserved[63];
#else
  int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
  unsigned gpuPciDeviceID, gpuPciSubsystemID;
  int hostNumaMultinodeIpcSupported, reserved[56];
#endif
};

struct FunctionAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight;
  int requiredClusterDepth, clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};

struct PointerAttributes {
  int type, device;  // type: 0 unregistered, 1 host, 2 device, 3 managed
  void *devicePointer, *hostPointer;
#if CUDA_MAJOR >= 13
  long reserved[8];
#endif
};

struct AllocationProperties {  // CUmemAllocationProp
  int type, requestedHandleTypes, locationType, locationId;
  void* win32HandleMetaData;
  unsigned char compressionType, gpuDirectRDMACapable;
  unsigned short usage;
  unsigned char reserved[4];
};
