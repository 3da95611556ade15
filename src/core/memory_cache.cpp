#include "core/memory_cache.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

namespace switchyard {

std::int64_t size_class(std::int64_t bytes) {
  constexpr std::int64_t kSmallest = 4096;
  bytes = std::max(bytes, kSmallest);
  const auto step_bits = std::bit_width(static_cast<std::uint64_t>(bytes)) - 4;
  const std::int64_t step = std::int64_t{1} << step_bits;
  return (bytes + step - 1) & ~(step - 1);
}

struct MemoryCache::Blocks {
  std::mutex mutex;
  std::multimap<std::int64_t, Tensor> kept;  // by size
  std::int64_t bytes_held = 0;

  Tensor take(std::int64_t bytes) {
    const std::scoped_lock lock(mutex);
    const auto found = kept.lower_bound(bytes);
    if (found != kept.end() && found->first <= 2 * bytes) {
      Tensor block = std::move(found->second);
      kept.erase(found);
      return block;
    }
    // What is kept and too small would only be joined by more: sizes have grown.
    for (auto i = kept.begin(); i != kept.end() && i->first < bytes;) {
      if (2 * i->first < bytes) {
        ++i;
        continue;
      }
      bytes_held -= i->first;
      i = kept.erase(i);
    }
    Tensor block({bytes / size_of(Dtype::i32)}, Dtype::i32);
    bytes_held += bytes;
    return block;
  }

  void give_back(Tensor block) {
    const std::scoped_lock lock(mutex);
    const auto bytes = block.bytes();
    kept.emplace(bytes, std::move(block));
  }
};

MemoryCache::MemoryCache() : blocks_(std::make_shared<Blocks>()) {}

TensorView MemoryCache::take(const Shape& shape, Dtype dtype) {
  const auto block =
      std::make_shared<Tensor>(blocks_->take(size_class(shape.num_elements() * size_of(dtype))));
  const std::shared_ptr<std::byte> owner(block->data(), [blocks = blocks_, block](std::byte*) {
    blocks->give_back(std::move(*block));
  });
  return {owner.get(), dtype, shape, shape.row_elements(), owner};
}

std::int64_t MemoryCache::bytes_held() const {
  const std::scoped_lock lock(blocks_->mutex);
  return blocks_->bytes_held;
}

}  // namespace switchyard
