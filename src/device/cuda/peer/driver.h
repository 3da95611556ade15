// SPDX-License-Identifier: Apache-2.0
// CUDA driver functions, looked up at run time so that the library also loads without a driver.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace switchyard::cuda {

// instance() throws DeviceError if the driver lacks one of the functions.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) unreserve;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_memory;
  decltype(&cuMemImportFromShareableHandle) import_memory;

  static const Driver& instance();
};

void check_driver(CUresult status, std::string_view what);
CUmemLocation location_of(int ordinal);

// A reserved range of GPU addresses, into which memory is mapped piece by piece.
class GpuAddresses {
 public:
  GpuAddresses(std::int64_t bytes, std::int64_t alignment);
  ~GpuAddresses();  // unmaps all mapped memory
  GpuAddresses(const GpuAddresses&) = delete;
  GpuAddresses& operator=(const GpuAddresses&) = delete;

  std::byte* at(std::int64_t offset) const;
  std::int64_t bytes() const { return bytes_; }

  // Maps memory at `offset` and lets the GPUs in `access` use it. The memory lives for as long as
  // it is mapped.
  void map(CUmemGenericAllocationHandle memory, std::int64_t offset, std::int64_t bytes,
           std::span<const CUmemAccessDesc> access);

 private:
  CUdeviceptr base_ = 0;
  std::int64_t bytes_;
  std::vector<std::pair<CUdeviceptr, std::size_t>> mapped_;
};

}  // namespace switchyard::cuda
