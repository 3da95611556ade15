#include "device/cuda/peer/heap.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <vector>

#include "core/require.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

// The driver's functions, found at run time: the library loads where there is no driver.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
        "looking for a function of the driver");
  require<DeviceError>(function != nullptr, "the driver has no {}", name);
  return reinterpret_cast<Function>(function);
}

void check_driver(CUresult status, std::string_view what) {
  require<DeviceError>(status == CUDA_SUCCESS, "CUDA failed at {}: error {} of the driver", what,
                       static_cast<int>(status));
}

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      driver_function<decltype(granularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemAddressReserve) reserve =
      driver_function<decltype(reserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) unreserve = driver_function<decltype(unreserve)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = driver_function<decltype(create)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver_function<decltype(release)>("cuMemRelease");
  decltype(&cuMemMap) map = driver_function<decltype(map)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver_function<decltype(unmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = driver_function<decltype(set_access)>("cuMemSetAccess");
};

CUmemLocation location_of(int ordinal) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = ordinal;
  return location;
}

std::int64_t round_up(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

class MappedHeap final : public BlockSource {
 public:
  MappedHeap(int ordinal, std::span<const int> reached_from) : ordinal_(ordinal) {
    const OnGpu gpu(ordinal);
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = location_of(ordinal);
    std::size_t granularity = 0;
    check_driver(
        driver_.granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "asking for the granularity of memory");
    step_ = std::max(kLeastStep, static_cast<std::int64_t>(granularity));
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for the GPU's memory");
    reserved_ = round_up(static_cast<std::int64_t>(total), step_);
    check_driver(driver_.reserve(&base_, static_cast<std::size_t>(reserved_), granularity, 0, 0),
                 "reserving addresses for a heap");
    for (const int other : reached_from) {
      const bool is_known = std::ranges::any_of(
          access_, [&](const CUmemAccessDesc& known) { return known.location.id == other; });
      if (is_known) continue;
      int reaches = 1;
      if (other != ordinal) {
        check(cudaDeviceCanAccessPeer(&reaches, other, ordinal), "asking whether GPUs are peers");
      }
      require<Unsupported>(reaches != 0,
                           "GPU {} cannot reach the memory of GPU {}: ranks on GPUs need GPUs that "
                           "are peers",
                           other, ordinal);
      access_.push_back(
          {.location = location_of(other), .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
  }

  ~MappedHeap() override {
    for (const auto& [at, bytes] : mapped_) {
      driver_.unmap(at, static_cast<std::size_t>(bytes));
    }
    driver_.unreserve(base_, static_cast<std::size_t>(reserved_));
  }

  std::byte* base() const { return at(0); }
  std::int64_t reserved_bytes() const { return reserved_; }

  std::byte* allocate(std::int64_t bytes, CUstream_st* /*stream*/) override {
    const std::scoped_lock lock(mutex_);
    auto found = first_fit(bytes);
    if (found == free_.end()) {
      if (!grow(bytes)) return nullptr;
      found = first_fit(bytes);
    }
    const auto [offset, room] = *found;
    free_.erase(found);
    if (room > bytes) free_.emplace(offset + bytes, room - bytes);
    used_.emplace(offset, bytes);
    return at(offset);
  }

  void free(std::byte* block, CUstream_st* /*stream*/) override {
    const std::scoped_lock lock(mutex_);
    const auto used = used_.extract(block - at(0));
    add_free(used.key(), used.mapped());
  }

  // Peers may still be at them: they go with the heap.
  void close(std::span<std::byte* const> /*blocks*/) noexcept override {}

  std::string shortage(std::int64_t bytes) const override {
    return fmt::format(
        "GPU {} has no room for {} bytes more of a heap that ranks share, which has {}", ordinal_,
        bytes, mapped_bytes_);
  }

 private:
  static constexpr std::int64_t kLeastStep = std::int64_t{32} << 20;

  std::byte* at(std::int64_t offset) const { return std::bit_cast<std::byte*>(base_) + offset; }

  std::map<std::int64_t, std::int64_t>::iterator first_fit(std::int64_t bytes) {
    return std::ranges::find_if(free_, [&](const auto& part) { return part.second >= bytes; });
  }

  void add_free(std::int64_t offset, std::int64_t bytes) {
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && offset + bytes == after->first) {
      bytes += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_.emplace(offset, bytes);
  }

  // Maps memory at the end, an eighth of what there is or more, so that there are few pieces.
  bool grow(std::int64_t bytes) {
    const OnGpu gpu(ordinal_);
    for (const std::int64_t wanted : {std::max(bytes, mapped_bytes_ / 8), bytes}) {
      const std::int64_t size = round_up(wanted, step_);
      if (mapped_bytes_ + size > reserved_) continue;
      CUmemGenericAllocationHandle memory = 0;
      if (driver_.create(&memory, static_cast<std::size_t>(size), &properties_, 0) !=
          CUDA_SUCCESS) {
        continue;
      }
      const CUdeviceptr to = base_ + static_cast<CUdeviceptr>(mapped_bytes_);
      const CUresult status = driver_.map(to, static_cast<std::size_t>(size), 0, memory, 0);
      driver_.release(memory);  // which stays while it is mapped
      check_driver(status, "mapping memory of a heap");
      const CUresult reached =
          driver_.set_access(to, static_cast<std::size_t>(size), access_.data(), access_.size());
      if (reached != CUDA_SUCCESS) driver_.unmap(to, static_cast<std::size_t>(size));
      check_driver(reached, "letting ranks reach a heap");
      mapped_.emplace_back(to, size);
      add_free(mapped_bytes_, size);
      mapped_bytes_ += size;
      return true;
    }
    return false;
  }

  Driver driver_;
  int ordinal_;
  CUmemAllocationProp properties_{};
  std::vector<CUmemAccessDesc> access_;
  std::int64_t step_ = 0;
  std::int64_t reserved_ = 0;
  CUdeviceptr base_ = 0;
  std::mutex mutex_;
  std::int64_t mapped_bytes_ = 0;
  std::vector<std::pair<CUdeviceptr, std::int64_t>> mapped_;
  std::map<std::int64_t, std::int64_t> free_;  // offset, bytes
  std::map<std::int64_t, std::int64_t> used_;
};

}  // namespace

HeapSource make_heap_source(int ordinal, std::span<const int> reached_from) {
  const auto heap = std::make_shared<MappedHeap>(ordinal, reached_from);
  return {heap, heap->base(), heap->reserved_bytes()};
}

}  // namespace switchyard::cuda
