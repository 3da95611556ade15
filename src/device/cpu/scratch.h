// SPDX-License-Identifier: Apache-2.0
// Scratch memory of one thread, used by one task at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// A stack of pieces. release() frees everything taken since a mark. reset(), which runs before each
// task, frees everything. The block grows to the most memory that was in use at once.
class Scratch {
 public:
  void reset() noexcept;
  // Returns uninitialised memory, aligned to a cache line.
  std::byte* take_bytes(std::int64_t bytes);
  float* take_floats(std::int64_t count) {
    return reinterpret_cast<float*>(take_bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

  std::int64_t mark() const { return used_; }
  void release(std::int64_t mark) noexcept;

  std::int64_t bytes_held() const;

 private:
  struct Extra {
    std::int64_t begin = 0;  // bytes in use before this piece
    Tensor memory;
  };

  Tensor block_;
  std::vector<Extra> extras_;  // pieces that did not fit into the block
  std::int64_t used_ = 0;
  std::int64_t most_used_ = 0;
};

}  // namespace switchyard::cpu
