// Memory for one task at a time, of one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Pieces are handed out one after the other. release() takes back what was taken since a mark,
// reset(), which a task begins with, all of it. Grows to the most that was in use at once.
class Scratch {
 public:
  void reset() noexcept;
  // Uninitialised, on a cache line.
  std::byte* take_bytes(std::int64_t bytes);
  float* take_floats(std::int64_t count) {
    return reinterpret_cast<float*>(take_bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

  std::int64_t mark() const { return used_; }
  void release(std::int64_t mark) noexcept;

  std::int64_t bytes_held() const;

 private:
  struct Extra {
    std::int64_t begin = 0;  // bytes in use before it
    Tensor memory;
  };

  Tensor block_;
  std::vector<Extra> extras_;  // what did not fit into the block
  std::int64_t used_ = 0;
  std::int64_t most_used_ = 0;
};

}  // namespace switchyard::cpu
