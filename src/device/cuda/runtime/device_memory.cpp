#include "device/cuda/runtime/device_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/memory_cache.h"
#include "core/require.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

std::uint64_t capture_of(CUstream_st* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "asking whether a graph is captured");
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

struct DeviceMemory::Blocks {
  struct Block {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    std::uint64_t capture = 0;  // whose it is; 0: nobody's in particular
  };
  struct Kept {
    std::byte* data = nullptr;
    std::int64_t last_take = 0;
  };
  using Key = std::pair<std::uint64_t, std::int64_t>;  // capture, bytes

  explicit Blocks(int the_ordinal) : ordinal(the_ordinal) {}

  ~Blocks() {  // at the end of a program the driver may be gone, and the memory with it
    int before = 0;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(ordinal) != cudaSuccess) return;
    cudaDeviceSynchronize();
    for (const auto& [key, block] : kept) cudaFree(block.data);
    cudaSetDevice(before);
  }

  // Only blocks of the very size are reused: then a step that takes and gives back as one before it
  // finds what that left, which a capture depends on.
  Block take(std::int64_t bytes, CUstream_st* stream, Source source) {
    const std::scoped_lock lock(mutex);
    ++num_takes;
    const std::uint64_t capture = capture_of(stream);
    Block block;
    if (source == Source::given_back || capture != 0) block = find(capture, bytes);
    if (block.data == nullptr && capture != 0) block = find(0, bytes);
    if (block.data == nullptr) {
      require<DeviceError>(
          capture == 0,
          "a captured step needs {} bytes of the GPU's memory that are not kept from a step before "
          "it: run the step once before it is captured",
          bytes);
      free_kept(stream, num_takes - kTakesKept);
      block = {allocate(bytes, stream), bytes, 0};
      bytes_held += bytes;
    }
    block.capture = capture;
    return block;
  }

  void give_back(const Block& block) {
    const std::scoped_lock lock(mutex);
    const auto capture = released.contains(block.capture) ? 0 : block.capture;
    kept.emplace(Key{capture, block.bytes}, Kept{block.data, num_takes});
  }

  // What is still in use follows when it is given back.
  void release(std::uint64_t capture) {
    const std::scoped_lock lock(mutex);
    released.insert(capture);
    const auto begin = kept.lower_bound(Key{capture, 0});
    const auto end = kept.lower_bound(Key{capture + 1, 0});
    for (auto i = begin; i != end; i = kept.erase(i)) {
      kept.emplace(Key{0, i->first.second}, Kept{i->second.data, num_takes});
    }
  }

  std::mutex mutex;
  int ordinal;
  std::multimap<Key, Kept> kept;
  std::set<std::uint64_t> released;  // captures
  std::int64_t num_takes = 0;
  std::int64_t bytes_held = 0;

 private:
  // Blocks that no take has wanted for so long belong to sizes that have gone: some tens of steps.
  static constexpr std::int64_t kTakesKept = 4096;

  Block find(std::uint64_t capture, std::int64_t bytes) {
    const auto found = kept.find(Key{capture, bytes});
    if (found == kept.end()) return {};
    const Block block{found->second.data, bytes, capture};
    kept.erase(found);
    return block;
  }

  std::byte* allocate(std::int64_t bytes, CUstream_st* stream) {
    void* data = nullptr;
    auto status = cudaMallocAsync(&data, static_cast<std::size_t>(bytes), stream);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      free_kept(stream, num_takes);
      cudaStreamSynchronize(stream);
      status = cudaMallocAsync(&data, static_cast<std::size_t>(bytes), stream);
    }
    if (status == cudaErrorMemoryAllocation) {
      std::size_t free = 0;
      std::size_t total = 0;
      cudaGetLastError();
      cudaMemGetInfo(&free, &total);
      throw DeviceError(
          fmt::format("GPU {} has no room for {} bytes: {} of {} are free, and {} are in use here",
                      ordinal, bytes, free, total, bytes_held));
    }
    check(status, "taking memory");
    return static_cast<std::byte*>(data);
  }

  // What was given back before a take, and no graph may use.
  void free_kept(CUstream_st* stream, std::int64_t before) {
    const auto end = kept.lower_bound(Key{1, 0});
    for (auto i = kept.begin(); i != end;) {
      if (i->second.last_take > before) {
        ++i;
        continue;
      }
      check(cudaFreeAsync(i->second.data, stream), "giving memory back");
      bytes_held -= i->first.second;
      i = kept.erase(i);
    }
  }
};

DeviceMemory::DeviceMemory(int ordinal) : blocks_(std::make_shared<Blocks>(ordinal)) {}

TensorView DeviceMemory::take(const Shape& shape, Dtype dtype, CUstream_st* stream) {
  return take(shape, dtype, stream, Source::given_back);
}

TensorView DeviceMemory::take_to_keep(const Shape& shape, Dtype dtype, CUstream_st* stream) {
  return take(shape, dtype, stream, Source::anew);
}

TensorView DeviceMemory::take(const Shape& shape, Dtype dtype, CUstream_st* stream, Source source) {
  const auto block =
      blocks_->take(size_class(shape.num_elements() * size_of(dtype)), stream, source);
  const std::shared_ptr<std::byte> owner(
      block.data, [blocks = blocks_, block](std::byte*) { blocks->give_back(block); });
  return {owner.get(), dtype, shape, shape.row_elements(), owner, Memory::gpu};
}

void DeviceMemory::release(std::uint64_t capture) { blocks_->release(capture); }

std::int64_t DeviceMemory::bytes_held() const {
  const std::scoped_lock lock(blocks_->mutex);
  return blocks_->bytes_held;
}

}  // namespace switchyard::cuda
