// Asks the CUDA runtime for its devices.
#include "device/cuda/runtime/probe.h"

#include <cuda_runtime_api.h>

#include "core/require.h"

namespace switchyard::cuda {
namespace {

// What kernels are written for: asynchronous copies and bf16 tensor cores.
constexpr int kOldestMajor = 8;

}  // namespace

std::string toolkit_version() {
  return fmt::format("toolkit {}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

std::string reason_against(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  if (ordinal < 0 || ordinal >= count) return fmt::format("there are {} GPUs here", count);
  int major = 0;
  int pools = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, ordinal);
  if (major < kOldestMajor) {
    return fmt::format("its compute capability is {}.x, and kernels are for {}.0 and up", major,
                       kOldestMajor);
  }
  return pools != 0 ? "" : "its driver has no stream-ordered memory pools";
}

Feature device_feature() {
  const auto reason = reason_against(0);
  if (!reason.empty()) return {"cuda", false, reason};
  int count = 0;
  cudaDeviceProp properties{};
  cudaGetDeviceCount(&count);
  cudaGetDeviceProperties(&properties, 0);
  return {"cuda", true,
          fmt::format("{} x {}, {}.{}, {} multiprocessors, {:.0f} GiB", count,
                      static_cast<const char*>(properties.name), properties.major, properties.minor,
                      properties.multiProcessorCount,
                      static_cast<double>(properties.totalGlobalMem) / (1 << 30))};
}

}  // namespace switchyard::cuda
