// Memory for one task at a time, of one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Pieces are handed out one after the other, and all taken back by reset(), which a task calls
// first. Grows to what the largest task has needed.
class Scratch {
 public:
  void reset();
  // Uninitialised, on a cache line.
  std::byte* take_bytes(std::int64_t bytes);
  float* take_floats(std::int64_t count) {
    return reinterpret_cast<float*>(take_bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

  // A place to return to: what is taken after mark() is given back by release(mark).
  std::int64_t mark() const { return used_; }
  void release(std::int64_t mark);

 private:
  Tensor block_;
  std::vector<Tensor> more_;  // what did not fit, until the next reset
  std::int64_t used_ = 0;
};

}  // namespace switchyard::cpu
