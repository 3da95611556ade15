// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/peer/heap.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/descriptor.h"
#include "core/require.h"
#include "device/cuda/peer/driver.h"
#include "device/cuda/runtime/context.h"
#include "device/heap_space.h"

namespace switchyard::cuda {
namespace {

std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kHeapStep - 1) / kHeapStep * kHeapStep;
}

std::int64_t bytes_of_gpu() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for the GPU's memory");
  return round_up(static_cast<std::int64_t>(total));
}

CUmemAllocationProp properties_for(int ordinal, bool is_exported) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location_of(ordinal);
  if (is_exported) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::size_t granularity = 0;
  check_driver(Driver::instance().granularity(&granularity, &properties,
                                              CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "asking for the granularity of memory");
  require<Unsupported>(kHeapStep % static_cast<std::int64_t>(granularity) == 0,
                       "GPU {} maps memory in units of {} bytes, but {} is not a multiple of that",
                       ordinal, granularity, std::int64_t{kHeapStep});
  return properties;
}

// Returns the access rights for the GPU itself and for the GPUs that reach its memory.
std::vector<CUmemAccessDesc> access_for(int ordinal, std::span<const int> reached_from) {
  std::vector<int> ordinals(reached_from.begin(), reached_from.end());
  ordinals.push_back(ordinal);
  std::ranges::sort(ordinals);
  ordinals.erase(std::ranges::unique(ordinals).begin(), ordinals.end());
  std::vector<CUmemAccessDesc> access;
  for (const int other : ordinals) {
    int reaches = 1;
    if (other != ordinal) {
      check(cudaDeviceCanAccessPeer(&reaches, other, ordinal), "asking whether GPUs are peers");
    }
    require<Unsupported>(
        reaches != 0,
        "GPU {} cannot reach the memory of GPU {}: ranks need GPUs with peer access to each other",
        other, ordinal);
    access.push_back({.location = location_of(other), .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  return access;
}

class MappedHeap final : public BlockSource {
 public:
  MappedHeap(int ordinal, const PeerHeapOptions& options)
      : ordinal_(ordinal),
        announce_(options.announce),
        properties_(properties_for(ordinal, announce_ != nullptr)),
        access_(access_for(ordinal, options.ordinals)),
        addresses_(bytes_of_gpu(), kHeapStep) {}

  std::byte* base() const { return addresses_.at(0); }
  std::int64_t reserved_bytes() const { return addresses_.bytes(); }

  std::byte* allocate(std::int64_t bytes, CUstream_st* /*stream*/) override {
    const std::scoped_lock lock(mutex_);
    auto offset = space_.take(bytes);
    if (!offset && grow(bytes)) offset = space_.take(bytes);
    return offset ? addresses_.at(*offset) : nullptr;
  }

  void free(std::byte* block, CUstream_st* /*stream*/) override {
    const std::scoped_lock lock(mutex_);
    space_.give_back(block - addresses_.at(0));
  }

  // Peers may still be using the blocks, so they are only freed with the heap.
  void close(std::span<std::byte* const> /*blocks*/) noexcept override {}

  std::string shortage(std::int64_t bytes) const override {
    return fmt::format(
        "GPU {} has no room for {} more bytes of a heap that ranks share, which has {}", ordinal_,
        bytes, space_.end());
  }

 private:
  // Grows by at least an eighth of the current size if possible, so that there are few pieces.
  // Returns false if there is no room.
  bool grow(std::int64_t bytes) {
    const OnGpu gpu(ordinal_);
    for (const std::int64_t wanted : {std::max(bytes, space_.end() / 8), bytes}) {
      const std::int64_t size = round_up(wanted);
      if (space_.end() + size > addresses_.bytes()) continue;
      CUmemGenericAllocationHandle memory = 0;
      const CUresult made =
          Driver::instance().create(&memory, static_cast<std::size_t>(size), &properties_, 0);
      if (made == CUDA_ERROR_OUT_OF_MEMORY) continue;
      check_driver(made, "allocating memory that other ranks can reach");
      try {
        addresses_.map(memory, space_.end(), size, access_);
        if (announce_ != nullptr) announce(memory, size);
      } catch (...) {
        Driver::instance().release(memory);
        throw;
      }
      Driver::instance().release(memory);
      space_.grow(size);
      return true;
    }
    return false;
  }

  void announce(CUmemGenericAllocationHandle memory, std::int64_t bytes) const {
    int number = -1;
    check_driver(Driver::instance().export_memory(&number, memory,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "exporting memory to other processes");
    const Descriptor exported(number);
    announce_({.descriptor = number, .offset = space_.end(), .bytes = bytes});
  }

  int ordinal_;
  std::function<void(const HeapPiece&)> announce_;
  CUmemAllocationProp properties_;
  std::vector<CUmemAccessDesc> access_;
  GpuAddresses addresses_;
  std::mutex mutex_;
  HeapSpace space_;
};

}  // namespace

HeapSource make_heap_source(int ordinal, const PeerHeapOptions& options) {
  const OnGpu gpu(ordinal);
  const auto heap = std::make_shared<MappedHeap>(ordinal, options);
  return {heap, heap->base(), heap->reserved_bytes()};
}

}  // namespace switchyard::cuda
