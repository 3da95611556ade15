// SPDX-License-Identifier: Apache-2.0
// Holds streams up.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

#include "switchyard/device.h"

namespace switchyard::testing {

inline void require_success(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Holds streams up until it is opened.
class Gate {
 public:
  Gate() {
    void* memory = nullptr;
    require_success(cudaHostAlloc(&memory, sizeof(*flag_), cudaHostAllocMapped));
    flag_ = new (memory) std::atomic<std::uint32_t>(0);
    require_success(cudaHostGetDevicePointer(&on_device_, memory, 0));
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    require_success(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000,
                                                     cudaEnableDefault, &found));
    if (function == nullptr) throw std::runtime_error("no cuStreamWaitValue32");
    wait_ = reinterpret_cast<decltype(wait_)>(function);
  }
  ~Gate() {
    open();
    cudaDeviceSynchronize();
    cudaFreeHost(flag_);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void close(Stream stream) {
    const auto status =
        wait_(static_cast<CUstream>(stream.handle), reinterpret_cast<CUdeviceptr>(on_device_), 1,
              CU_STREAM_WAIT_VALUE_GEQ);
    if (status != CUDA_SUCCESS) throw std::runtime_error("cuStreamWaitValue32 failed");
  }
  void open() { flag_->store(1); }
  bool is_open() const { return flag_->load() != 0; }

 private:
  std::atomic<std::uint32_t>* flag_ = nullptr;
  void* on_device_ = nullptr;
  CUresult (*wait_)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
};

}  // namespace switchyard::testing
