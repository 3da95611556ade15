// SPDX-License-Identifier: Apache-2.0
// The functions of CUDA's driver that the library and its tests look up: tensor maps, and memory
// that several ranks map. That memory is a file without a name, and its handle the descriptor.
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <thread>

#include "emulation/launch.h"
#include "emulation/tensor_map.h"

namespace emulation {
namespace {

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                           const cuuint64_t* extents, const cuuint64_t* strides,
                           const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill) {
  const bool is_known = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && rank == 4 && steps[0] == 1 &&
                        swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] == 64 &&
                        reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  if (!is_known) return CUDA_ERROR_INVALID_VALUE;
  TensorMap to{};
  to.data = static_cast<std::byte*>(data);
  for (int d = 0; d < 4; ++d) {
    if (extents[d] == 0 || box[d] == 0 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
    to.extents[d] = extents[d];
    to.box[d] = box[d];
    if (d == 0) continue;
    const auto stride = strides[d - 1];
    if (stride % 16 != 0 || stride >> 40 != 0) return CUDA_ERROR_INVALID_VALUE;
    to.strides[d - 1] = stride;
  }
  *map = {};
  std::memcpy(map, &to, sizeof(to));
  return CUDA_SUCCESS;
}

constexpr std::size_t kGranularity = std::size_t{2} << 20;

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
int descriptor_of(CUmemGenericAllocationHandle handle) { return static_cast<int>(handle) - 1; }
CUmemGenericAllocationHandle handle_of(int descriptor) {
  return static_cast<CUmemGenericAllocationHandle>(descriptor) + 1;
}
CUresult success_if(bool is_true) { return is_true ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult get_granularity(std::size_t* bytes, const CUmemAllocationProp*,
                         CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

// Addresses that nothing is mapped to may not be accessed.
CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment, CUdeviceptr,
                 unsigned long long) {
  const std::size_t all = bytes + alignment;
  void* const base =
      mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  const auto aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned > begin) munmap(base, aligned - begin);
  if (begin + alignment > aligned) munmap(pointer(aligned + bytes), begin + alignment - aligned);
  *address = aligned;
  return CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, std::size_t bytes) {
  return success_if(munmap(pointer(address), bytes) == 0);
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  const int descriptor = memfd_create("emulated GPU", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  void* const memory = mmap(nullptr, bytes, PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(memory, 0xFF, bytes);  // NaN, as all memory of this GPU
  munmap(memory, bytes);
  *handle = handle_of(descriptor);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  return success_if(close(descriptor_of(handle)) == 0);
}
CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
             CUmemGenericAllocationHandle handle, unsigned long long) {
  return success_if(mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                         descriptor_of(handle), static_cast<off_t>(offset)) != MAP_FAILED);
}
CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  return success_if(mmap(pointer(address), bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                         0) != MAP_FAILED);
}
CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
  return success_if(mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) == 0);
}
CUresult export_memory(void* descriptor, CUmemGenericAllocationHandle handle,
                       CUmemAllocationHandleType, unsigned long long) {
  const int copy = fcntl(descriptor_of(handle), F_DUPFD_CLOEXEC, 0);
  std::memcpy(descriptor, &copy, sizeof(copy));
  return success_if(copy >= 0);
}
CUresult import_memory(CUmemGenericAllocationHandle* handle, void* descriptor,
                       CUmemAllocationHandleType) {
  const auto number = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  const int copy = fcntl(number, F_DUPFD_CLOEXEC, 0);
  *handle = handle_of(copy);
  return success_if(copy >= 0);
}

CUresult wait_for_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  do_on_stream(stream, [word = static_cast<const cuuint32_t*>(pointer(address)), value] {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) std::this_thread::yield();
  });
  return CUDA_SUCCESS;
}

void* find_function(std::string_view name) {
  if (name == "cuTensorMapEncodeTiled") return reinterpret_cast<void*>(&encode_tensor_map);
  if (name == "cuMemGetAllocationGranularity") return reinterpret_cast<void*>(&get_granularity);
  if (name == "cuMemAddressReserve") return reinterpret_cast<void*>(&reserve);
  if (name == "cuMemAddressFree") return reinterpret_cast<void*>(&unreserve);
  if (name == "cuMemCreate") return reinterpret_cast<void*>(&create);
  if (name == "cuMemRelease") return reinterpret_cast<void*>(&release);
  if (name == "cuMemMap") return reinterpret_cast<void*>(&map);
  if (name == "cuMemUnmap") return reinterpret_cast<void*>(&unmap);
  if (name == "cuMemSetAccess") return reinterpret_cast<void*>(&set_access);
  if (name == "cuMemExportToShareableHandle") return reinterpret_cast<void*>(&export_memory);
  if (name == "cuMemImportFromShareableHandle") return reinterpret_cast<void*>(&import_memory);
  if (name == "cuStreamWaitValue32") return reinterpret_cast<void*>(&wait_for_value);
  return nullptr;
}

}  // namespace
}  // namespace emulation

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  *function = emulation::find_function(name);
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
