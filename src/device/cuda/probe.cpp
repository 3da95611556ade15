// Asks the CUDA runtime for its devices.
#include "device/cuda/probe.h"

#include <cuda_runtime_api.h>

#include "core/require.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

std::string toolkit_version() {
  return fmt::format("toolkit {}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

Feature device_feature() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return {"cuda", false, error != cudaSuccess ? cudaGetErrorString(error) : "no device"};
  }
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, 0);
  return {"cuda", false,
          fmt::format("{} x {} present, but this version has no CUDA kernels", count,
                      static_cast<const char*>(properties.name))};
}

}  // namespace switchyard::cuda

namespace switchyard {

Device Device::cuda(const CudaOptions& /*options*/) {
  throw Unsupported(cuda::device_feature().detail);
}

}  // namespace switchyard
