// Memory that is taken and given back every step, without asking the system each time, which would
// have to zero it first.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/tensor.h"

namespace switchyard {

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
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace switchyard
