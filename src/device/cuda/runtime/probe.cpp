// SPDX-License-Identifier: Apache-2.0
// Queries the CUDA runtime for its devices.
#include "device/cuda/runtime/probe.h"

#include <cuda_runtime_api.h>

#include <bit>

#include "core/require.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

// The oldest compute capability with what the kernels need: asynchronous copies and bf16 tensor
// cores.
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
    return fmt::format("its compute capability is {}.x, but the kernels need {}.0 or higher", major,
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

std::vector<Gpu> gpus() {
  std::vector<Gpu> all;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return all;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    cudaGetDeviceProperties(&properties, ordinal);
    Gpu gpu{.ordinal = ordinal,
            .name = static_cast<const char*>(properties.name),
            .is_under_mps = is_under_mps(ordinal)};
    for (int other = 0; other < count; ++other) {
      int reaches = 0;
      if (other != ordinal) cudaDeviceCanAccessPeer(&reaches, ordinal, other);
      if (reaches != 0) gpu.reaches.push_back(other);
    }
    all.push_back(std::move(gpu));
  }
  return all;
}

DeviceIdentity identity_of(int ordinal) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "asking for a GPU's identity");
  return std::bit_cast<DeviceIdentity>(properties.uuid);
}

std::string reason_against_reaching(int ordinal, const DeviceIdentity& other) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting GPUs");
  for (int visible = 0; visible < count; ++visible) {
    if (identity_of(visible) != other) continue;
    int reaches = 1;
    if (visible != ordinal) {
      check(cudaDeviceCanAccessPeer(&reaches, ordinal, visible), "asking whether GPUs are peers");
    }
    return reaches != 0 ? ""
                        : fmt::format("its GPUs {} and {} have no peer access to each other",
                                      ordinal, visible);
  }
  return "it cannot see that rank's GPU: let every rank see all GPUs (CUDA_VISIBLE_DEVICES)";
}

bool is_under_mps(int ordinal) {
  int enabled = 0;
  return cudaDeviceGetAttribute(&enabled, cudaDevAttrMpsEnabled, ordinal) == cudaSuccess &&
         enabled != 0;
}

}  // namespace switchyard::cuda
