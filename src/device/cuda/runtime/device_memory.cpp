// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/runtime/device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

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

namespace {

// A private stream-ordered pool that keeps its memory. With the GPU's default pool, CUDA may make
// the stream that takes a block wait for the stream that freed it, and ranks that wait for each
// other must not wait for anything else.
class StreamPool final : public BlockSource {
 public:
  explicit StreamPool(int ordinal) : ordinal_(ordinal) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, ordinal};
    check(cudaMemPoolCreate(&pool_, &properties), "making a pool of memory");
    std::uint64_t kept = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept),
          "making a pool of memory");
  }
  ~StreamPool() override { cudaMemPoolDestroy(pool_); }

  std::byte* allocate(std::int64_t bytes, CUstream_st* stream) override {
    void* data = nullptr;
    const auto status =
        cudaMallocFromPoolAsync(&data, static_cast<std::size_t>(bytes), pool_, stream);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(status, "taking memory");
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* block, CUstream_st* stream) override {
    check(cudaFreeAsync(block, stream), "giving memory back");
  }
  void close(std::span<std::byte* const> blocks) noexcept override {
    int before = 0;  // at program exit the driver may be gone, and the memory with it
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(ordinal_) != cudaSuccess) return;
    cudaDeviceSynchronize();
    for (std::byte* const block : blocks) cudaFree(block);
    cudaSetDevice(before);
  }
  std::string shortage(std::int64_t bytes) const override {
    std::size_t free = 0;
    std::size_t total = 0;
    cudaMemGetInfo(&free, &total);
    return fmt::format("GPU {} has no room for {} bytes: {} of {} are free", ordinal_, bytes, free,
                       total);
  }

 private:
  int ordinal_;
  cudaMemPool_t pool_ = nullptr;
};

class CallersMemory final : public BlockSource {
 public:
  explicit CallersMemory(DeviceAllocator allocator) : allocator_(std::move(allocator)) {}

  std::byte* allocate(std::int64_t bytes, CUstream_st* stream) override {
    return static_cast<std::byte*>(allocator_.allocate(bytes, {stream}));
  }
  void free(std::byte* block, CUstream_st* stream) override { allocator_.free(block, {stream}); }
  void close(std::span<std::byte* const> /*blocks*/) noexcept override {}
  std::string shortage(std::int64_t bytes) const override {
    return fmt::format("the program's allocator has no room for {} bytes", bytes);
  }
  bool reuses_blocks() const override { return true; }

 private:
  DeviceAllocator allocator_;
};

std::shared_ptr<BlockSource> source_of(const CudaOptions& options) {
  if (!options.allocator.allocate) return std::make_shared<StreamPool>(options.ordinal);
  require(options.allocator.free != nullptr, "the allocator has no release function");
  return std::make_shared<CallersMemory>(options.allocator);
}

}  // namespace

struct DeviceMemory::Blocks {
  struct Block {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    CUstream_st* stream = nullptr;  // the stream it was allocated on
    // Captures whose graphs may use the block; if there are none, anyone may take it.
    std::vector<std::uint64_t> captures = {};
  };
  struct Kept {
    Block block;
    std::int64_t last_take = 0;
  };
  using Key = std::pair<std::uint64_t, std::int64_t>;  // (first capture or 0, bytes)

  explicit Blocks(std::shared_ptr<BlockSource> the_source) : source(std::move(the_source)) {}

  ~Blocks() {
    std::vector<std::byte*> left;
    for (const auto& [key, of_size] : kept) left.push_back(of_size.block.data);
    source->close(left);
  }

  // Only reuses blocks of exactly this size. A step that takes and gives back the same blocks as
  // the previous step then finds them all, which a capture relies on.
  std::byte* take(std::int64_t bytes, CUstream_st* stream, Source wanted) {
    const std::scoped_lock lock(mutex);
    ++num_takes;
    if (source->reuses_blocks()) return add(bytes, stream);
    const std::uint64_t capture = capture_of(stream);
    active = capture;
    Block block;
    if (wanted == Source::given_back || capture != 0) block = find(capture, bytes);
    if (block.data == nullptr && capture != 0) block = find(0, bytes);
    if (block.data == nullptr) {
      require<DeviceError>(capture == 0,
                           "a captured step needs {} bytes of GPU memory that no earlier step has "
                           "allocated: run the step once before capturing it",
                           bytes);
      free_kept(stream, num_takes - kTakesKept);
      block = {allocate(bytes, stream), bytes, stream};
      bytes_held += bytes;
    }
    if (capture != 0) add_user(block, capture);
    auto* const data = block.data;
    taken.emplace(data, std::move(block));
    return data;
  }

  void give_back(std::byte* data) {
    const std::scoped_lock lock(mutex);
    Block block = std::move(taken.extract(data).mapped());
    if (source->reuses_blocks()) {
      source->free(data, block.stream);
      bytes_held -= block.bytes;
      return;
    }
    if (active != 0) add_user(block, active);
    keep(std::move(block));
  }

  void begin_capture(std::uint64_t capture) {
    const std::scoped_lock lock(mutex);
    active = capture;
  }

  void end_capture(std::uint64_t capture) {
    const std::scoped_lock lock(mutex);
    for (auto& [data, block] : taken) add_user(block, capture);
    active = 0;
  }

  // Blocks of the capture that are still in use are released when they are given back.
  void release(std::uint64_t capture) {
    const std::scoped_lock lock(mutex);
    released.insert(capture);
    std::vector<Block> used;
    for (auto i = kept.lower_bound(Key{1, 0}); i != kept.end();) {
      const auto& captures = i->second.block.captures;
      if (std::ranges::find(captures, capture) == captures.end()) {
        ++i;
        continue;
      }
      used.push_back(std::move(i->second.block));
      i = kept.erase(i);
    }
    for (Block& block : used) keep(std::move(block));
  }

  std::mutex mutex;
  std::shared_ptr<BlockSource> source;
  std::map<std::byte*, Block> taken;
  std::multimap<Key, Kept> kept;
  std::set<std::uint64_t> released;  // captures
  std::uint64_t active = 0;          // the capture in progress, as far as this object knows
  std::int64_t num_takes = 0;
  std::int64_t bytes_held = 0;

 private:
  // A block that was not reused within this many takes, a few dozen steps, has a size that is no
  // longer needed.
  static constexpr std::int64_t kTakesKept = 4096;

  std::byte* add(std::int64_t bytes, CUstream_st* stream) {
    std::byte* const data = allocate(bytes, stream);
    taken.emplace(data, Block{data, bytes, stream});
    bytes_held += bytes;
    return data;
  }

  Block find(std::uint64_t capture, std::int64_t bytes) {
    const auto found = kept.find(Key{capture, bytes});
    if (found == kept.end()) return {};
    Block block = std::move(found->second.block);
    kept.erase(found);
    return block;
  }

  static void add_user(Block& block, std::uint64_t capture) {
    const bool is_known = std::ranges::find(block.captures, capture) != block.captures.end();
    if (!is_known) block.captures.push_back(capture);
  }

  void keep(Block block) {
    std::erase_if(block.captures,
                  [&](std::uint64_t capture) { return released.contains(capture); });
    const Key key{block.captures.empty() ? 0 : block.captures.front(), block.bytes};
    kept.emplace(key, Kept{std::move(block), num_takes});
  }

  std::byte* allocate(std::int64_t bytes, CUstream_st* stream) {
    std::byte* data = source->allocate(bytes, stream);
    if (data == nullptr && !source->reuses_blocks()) {
      free_kept(stream, num_takes);
      cudaStreamSynchronize(stream);
      data = source->allocate(bytes, stream);
    }
    require<DeviceError>(data != nullptr, "{}, and {} are in use here",
                         data == nullptr ? source->shortage(bytes) : "", bytes_held);
    return data;
  }

  // Frees the kept blocks that no graph may use and that were given back up to take number
  // `before`.
  void free_kept(CUstream_st* stream, std::int64_t before) {
    const auto end = kept.lower_bound(Key{1, 0});
    for (auto i = kept.begin(); i != end;) {
      if (i->second.last_take > before) {
        ++i;
        continue;
      }
      source->free(i->second.block.data, stream);
      bytes_held -= i->first.second;
      i = kept.erase(i);
    }
  }
};

DeviceMemory::DeviceMemory(const CudaOptions& options) : DeviceMemory(source_of(options)) {}

DeviceMemory::DeviceMemory(std::shared_ptr<BlockSource> source)
    : blocks_(std::make_shared<Blocks>(std::move(source))) {}

TensorView DeviceMemory::take(const Shape& shape, Dtype dtype, CUstream_st* stream) {
  return take(shape, dtype, stream, Source::given_back);
}

TensorView DeviceMemory::take_to_keep(const Shape& shape, Dtype dtype, CUstream_st* stream) {
  return take(shape, dtype, stream, Source::anew);
}

TensorView DeviceMemory::take(const Shape& shape, Dtype dtype, CUstream_st* stream, Source source) {
  const std::shared_ptr<std::byte> owner(
      blocks_->take(size_class(shape.num_elements() * size_of(dtype)), stream, source),
      [blocks = blocks_](std::byte* data) { blocks->give_back(data); });
  return {owner.get(), dtype, shape, shape.row_elements(), owner, Memory::gpu};
}

void DeviceMemory::begin_capture(std::uint64_t capture) { blocks_->begin_capture(capture); }
void DeviceMemory::end_capture(std::uint64_t capture) { blocks_->end_capture(capture); }
void DeviceMemory::release(std::uint64_t capture) { blocks_->release(capture); }

std::int64_t DeviceMemory::bytes_held() const {
  const std::scoped_lock lock(blocks_->mutex);
  return blocks_->bytes_held;
}

}  // namespace switchyard::cuda
