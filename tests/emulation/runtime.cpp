// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime that the library and its tests call, over the memory of the host.
#include "emulation/runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "emulation/launch.h"

struct CUmemPoolHandle_st {};

namespace emulation {
namespace {

constexpr std::size_t kMemoryBytes = std::size_t{2} << 30;
constexpr std::size_t kAlignment = 256;
constexpr int kMultiprocessors = 4;

thread_local cudaError_t last_error = cudaSuccess;

// Memory of the GPU. It begins as NaN, whatever the type.
struct Allocations {
  std::mutex mutex;
  std::map<void*, std::size_t> sizes;
  std::size_t taken = 0;

  cudaError_t take(void** to, std::size_t bytes) {
    const std::scoped_lock lock(mutex);
    const std::size_t size =
        (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    if (taken + size > kMemoryBytes) return noted(cudaErrorMemoryAllocation);
    *to = std::aligned_alloc(kAlignment, size);
    std::memset(*to, 0xFF, size);
    sizes.emplace(*to, size);
    taken += size;
    return cudaSuccess;
  }
  cudaError_t give_back(void* block) {
    if (block == nullptr) return cudaSuccess;
    const std::scoped_lock lock(mutex);
    const auto found = sizes.find(block);
    if (found == sizes.end()) return noted(cudaErrorInvalidValue);
    taken -= found->second;
    sizes.erase(found);
    std::free(block);
    return cudaSuccess;
  }
};
Allocations& allocations() {
  static auto* const all = new Allocations;  // outlives every device
  return *all;
}

// The dynamic shared memory that kernels have asked for.
struct DynamicSizes {
  std::mutex mutex;
  std::map<const void*, std::size_t> by_kernel;
};
DynamicSizes& dynamic_sizes() {
  static auto* const all = new DynamicSizes;
  return *all;
}

}  // namespace

std::size_t most_dynamic_bytes(const void* kernel) {
  auto& sizes = dynamic_sizes();
  const std::scoped_lock lock(sizes.mutex);
  const auto found = sizes.by_kernel.find(kernel);
  return found == sizes.by_kernel.end() ? kSharedBytesWithoutAsking : found->second;
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace emulation

using emulation::allocations;
using emulation::do_on_stream;
using emulation::noted;
using emulation::wait_for_streams;

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(emulation::last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheEmulatedGpu"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return "an error of the emulated GPU";
  }
}

// Devices
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : noted(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_streams();
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = emulation::kMultiprocessors;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated GPU");
  std::memset(&properties->uuid, 1, sizeof(properties->uuid));
  properties->major = 9;
  properties->multiProcessorCount = emulation::kMultiprocessors;
  properties->totalGlobalMem = emulation::kMemoryBytes;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > emulation::kSharedBytes) {
    return noted(cudaErrorInvalidValue);
  }
  auto& sizes = emulation::dynamic_sizes();
  const std::scoped_lock lock(sizes.mutex);
  sizes.by_kernel[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

// Memory
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *total = emulation::kMemoryBytes;
  const std::scoped_lock lock(allocations().mutex);
  *free = emulation::kMemoryBytes - allocations().taken;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** to, std::size_t bytes) { return allocations().take(to, bytes); }
cudaError_t cudaFree(void* block) {
  wait_for_streams();
  return allocations().give_back(block);
}
cudaError_t cudaHostAlloc(void** to, std::size_t bytes, unsigned) {
  return allocations().take(to, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** to, void* from, unsigned) {
  *to = from;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* block) { return allocations().give_back(block); }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = new CUmemPoolHandle_st;
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete pool;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** to, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  return allocations().take(to, bytes);
}
cudaError_t cudaFreeAsync(void* block, cudaStream_t stream) {
  do_on_stream(stream, [block] { allocations().give_back(block); });
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width,
                              std::size_t height, cudaStream_t stream) {
  do_on_stream(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memset(static_cast<std::byte*>(to) + row * pitch, value, width);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  do_on_stream(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch, width);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

}  // extern "C"
