// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>

#include "device/cuda/peer/driver.h"
#include "device/cuda/peer/heap.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

class MappedReachedHeap final : public ReachedHeap {
 public:
  MappedReachedHeap(int ordinal, std::int64_t reserved_bytes)
      : ordinal_(ordinal), addresses_(reserved_bytes, kHeapStep) {}

  std::byte* base() const override { return addresses_.at(0); }
  // Called on one of the library's own threads, so it leaves the GPU selected: switching back would
  // initialise another GPU.
  void map(const HeapPiece& piece) override {
    check(cudaSetDevice(ordinal_), "choosing the GPU");
    const Driver& driver = Driver::instance();
    CUmemGenericAllocationHandle memory = 0;
    check_driver(
        driver.import_memory(&memory, std::bit_cast<void*>(std::intptr_t{piece.descriptor}),
                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "importing memory of another process");
    const CUmemAccessDesc access{.location = location_of(ordinal_),
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    try {
      addresses_.map(memory, piece.offset, piece.bytes, {&access, 1});
    } catch (...) {
      driver.release(memory);
      throw;
    }
    driver.release(memory);
  }

 private:
  int ordinal_;
  GpuAddresses addresses_;
};

}  // namespace

std::shared_ptr<ReachedHeap> reach_heap(int ordinal, std::int64_t reserved_bytes) {
  const OnGpu gpu(ordinal);
  return std::make_shared<MappedReachedHeap>(ordinal, reserved_bytes);
}

}  // namespace switchyard::cuda
