// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/peer/heap.h"

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/memory_cache.h"

namespace switchyard::cpu {
namespace {

// Blocks live as long as the heap, since peers may still read blocks that were given back.
struct Blocks {
  using Free = std::multimap<std::int64_t, std::byte*>;  // keyed by size
  struct Block {
    Tensor memory;
    Free::node_type entry;  // set while the block is in use, so that giving it back cannot allocate
  };

  std::mutex mutex;
  std::map<std::byte*, Block> all;
  Free free;
  std::int64_t bytes_held = 0;

  std::byte* take(std::int64_t bytes) {
    const std::scoped_lock lock(mutex);
    if (const auto found = free.find(bytes); found != free.end()) {
      std::byte* const data = found->second;
      all.at(data).entry = free.extract(found);
      return data;
    }
    Tensor memory({bytes / size_of(Dtype::i64)}, Dtype::i64);
    std::byte* const data = memory.data();
    Free entry{{bytes, data}};
    all.emplace(data, Block{std::move(memory), entry.extract(entry.begin())});
    bytes_held += bytes;
    return data;
  }
  void give_back(std::byte* data) {
    const std::scoped_lock lock(mutex);
    free.insert(std::move(all.at(data).entry));
  }
  bool holds(const std::byte* data) {
    const std::scoped_lock lock(mutex);
    auto after = all.upper_bound(const_cast<std::byte*>(data));
    if (after == all.begin()) return false;
    const auto& [begin, block] = *std::prev(after);
    return data < begin + block.memory.bytes();
  }
};

class HostHeap final : public PeerHeap {
 public:
  // Offsets may be negative, so any fixed address can serve as the base.
  std::byte* base() const override { return reinterpret_cast<std::byte*>(blocks_.get()); }
  std::int64_t reserved_bytes() const override { return 0; }
  TensorView take(const Shape& shape, Dtype dtype) override {
    const std::shared_ptr<std::byte> owner(
        blocks_->take(size_class(shape.num_elements() * size_of(dtype))),
        [blocks = blocks_](std::byte* data) { blocks->give_back(data); });
    return {owner.get(), dtype, shape, shape.row_elements(), owner};
  }
  bool holds(const ConstTensorView& view) const override { return blocks_->holds(view.data()); }
  std::int64_t bytes_held() const override {
    const std::scoped_lock lock(blocks_->mutex);
    return blocks_->bytes_held;
  }

 private:
  std::shared_ptr<Blocks> blocks_ = std::make_shared<Blocks>();
};

}  // namespace

std::shared_ptr<PeerHeap> make_peer_heap() { return std::make_shared<HostHeap>(); }

}  // namespace switchyard::cpu
