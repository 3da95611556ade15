// SPDX-License-Identifier: Apache-2.0
#include "core/memory_cache.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;  // size_class cannot overflow up to here

}  // namespace

std::int64_t size_class(std::int64_t bytes) {
  constexpr std::int64_t kSmallest = 4096;
  bytes = std::max(bytes, kSmallest);
  const auto step_bits = std::bit_width(static_cast<std::uint64_t>(bytes)) - 4;
  const std::int64_t step = std::int64_t{1} << step_bits;
  return (bytes + step - 1) & ~(step - 1);
}

struct MemoryCache::Blocks {
  using Kept = std::multimap<std::int64_t, Tensor>;  // by size

  std::mutex mutex;
  Kept kept;
  std::int64_t bytes_held = 0;

  // Returns the block inside its map node, so that giving it back allocates nothing.
  Kept::node_type take(std::int64_t bytes) {
    const std::scoped_lock lock(mutex);
    const auto found = kept.lower_bound(bytes);
    if (found != kept.end() && found->first <= 2 * bytes) return kept.extract(found);
    // Sizes have grown: frees the blocks that are slightly too small, which would only pile up.
    for (auto i = kept.begin(); i != kept.end() && i->first < bytes;) {
      if (2 * i->first < bytes) {
        ++i;
        continue;
      }
      bytes_held -= i->first;
      i = kept.erase(i);
    }
    Kept made;
    made.emplace(bytes, Tensor({bytes / size_of(Dtype::i32)}, Dtype::i32));
    bytes_held += bytes;
    return made.extract(made.begin());
  }

  void give_back(Kept::node_type block) noexcept {
    const std::scoped_lock lock(mutex);
    kept.insert(std::move(block));
  }
};

struct MemoryCache::Lent {
  explicit Lent(std::shared_ptr<Blocks> from) : blocks(std::move(from)) {}
  ~Lent() {
    if (!block.empty()) blocks->give_back(std::move(block));
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  std::shared_ptr<Blocks> blocks;
  Blocks::Kept::node_type block;
};

MemoryCache::MemoryCache() : blocks_(std::make_shared<Blocks>()) {}

TensorView MemoryCache::take(const Shape& shape, Dtype dtype) {
  const auto bytes = shape.num_elements() * size_of(dtype);
  require<DeviceError>(bytes <= kMostBytes, "cannot allocate {} bytes of host memory", bytes);
  const auto lent = std::make_shared<Lent>(blocks_);
  lent->block = blocks_->take(size_class(bytes));
  const std::shared_ptr<std::byte> owner(lent, lent->block.mapped().data());
  return {owner.get(), dtype, shape, shape.row_elements(), owner};
}

std::int64_t MemoryCache::bytes_held() const {
  const std::scoped_lock lock(blocks_->mutex);
  return blocks_->bytes_held;
}

}  // namespace switchyard
