// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/peer/driver.h"

#include <cuda_runtime_api.h>

#include <bit>

#include "core/require.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

template <typename Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result),
        "looking for a function of the driver");
  require<DeviceError>(found != nullptr, "the driver has no {}", name);
  function = reinterpret_cast<Function>(found);
}

Driver find_driver() {
  Driver driver{};
  find(driver.granularity, "cuMemGetAllocationGranularity");
  find(driver.reserve, "cuMemAddressReserve");
  find(driver.unreserve, "cuMemAddressFree");
  find(driver.create, "cuMemCreate");
  find(driver.release, "cuMemRelease");
  find(driver.map, "cuMemMap");
  find(driver.unmap, "cuMemUnmap");
  find(driver.set_access, "cuMemSetAccess");
  find(driver.export_memory, "cuMemExportToShareableHandle");
  find(driver.import_memory, "cuMemImportFromShareableHandle");
  return driver;
}

}  // namespace

const Driver& Driver::instance() {
  static const Driver driver = find_driver();
  return driver;
}

void check_driver(CUresult status, std::string_view what) {
  require<DeviceError>(status == CUDA_SUCCESS, "CUDA failed at {}: error {} of the driver", what,
                       static_cast<int>(status));
}

CUmemLocation location_of(int ordinal) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = ordinal;
  return location;
}

GpuAddresses::GpuAddresses(std::int64_t bytes, std::int64_t alignment) : bytes_(bytes) {
  check_driver(Driver::instance().reserve(&base_, static_cast<std::size_t>(bytes),
                                          static_cast<std::size_t>(alignment), 0, 0),
               "reserving addresses for a heap");
}

GpuAddresses::~GpuAddresses() {
  const Driver& driver = Driver::instance();
  for (const auto& [at, bytes] : mapped_) driver.unmap(at, bytes);
  driver.unreserve(base_, static_cast<std::size_t>(bytes_));
}

std::byte* GpuAddresses::at(std::int64_t offset) const {
  return std::bit_cast<std::byte*>(base_) + offset;
}

void GpuAddresses::map(CUmemGenericAllocationHandle memory, std::int64_t offset, std::int64_t bytes,
                       std::span<const CUmemAccessDesc> access) {
  require<DeviceError>(0 <= offset && 0 <= bytes && bytes <= bytes_ - offset,
                       "{} bytes at {} are beyond the {} bytes of a heap", bytes, offset, bytes_);
  const Driver& driver = Driver::instance();
  const CUdeviceptr to = base_ + static_cast<CUdeviceptr>(offset);
  const auto size = static_cast<std::size_t>(bytes);
  check_driver(driver.map(to, size, 0, memory, 0), "mapping memory of a heap");
  const CUresult reached = driver.set_access(to, size, access.data(), access.size());
  if (reached != CUDA_SUCCESS) driver.unmap(to, size);
  check_driver(reached, "letting ranks reach a heap");
  mapped_.emplace_back(to, size);
}

}  // namespace switchyard::cuda
