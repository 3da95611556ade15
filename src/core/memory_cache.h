// Memory that is taken and given back every step, without asking the system each time, which would
// have to zero it first.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/tensor.h"

namespace switchyard {

// What is allocated for this many bytes: one of eight sizes to a doubling, so that row counts that
// vary from step to step reuse a block.
std::int64_t size_class(std::int64_t bytes);

// May be used from any thread. Blocks may outlive the cache.
class MemoryCache {
 public:
  MemoryCache();

  // Uninitialised; goes back to the cache when the last view of it is gone.
  TensorView take(const Shape& shape, Dtype dtype);

  // In use and kept.
  std::int64_t bytes_held() const;

 private:
  struct Blocks;
  struct Lent;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace switchyard
