// SPDX-License-Identifier: Apache-2.0
// Recycles memory that is allocated and freed every step. Fresh memory from the system would have
// to be zeroed first.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/tensor.h"

namespace switchyard {

// Rounds a request up to its allocation size. There are eight sizes per power of two, so that row
// counts that vary slightly between steps reuse the same block.
std::int64_t size_class(std::int64_t bytes);

// Thread-safe. Blocks may outlive the cache.
class MemoryCache {
 public:
  MemoryCache();

  // Returns uninitialised memory, which goes back to the cache with its last view.
  TensorView take(const Shape& shape, Dtype dtype);

  // Counts blocks in use and blocks kept for reuse.
  std::int64_t bytes_held() const;

 private:
  struct Blocks;
  struct Lent;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace switchyard
