// SPDX-License-Identifier: Apache-2.0
// Rotary positions: the pair (i, i + d/2) of a head with d dimensions is rotated by position ·
// base^(−2i/d).
#pragma once

#include <cstdint>
#include <vector>

#include "model/compute.h"
#include "switchyard/sequence.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

enum class Turn {
  forward,
  back,  // the inverse, which is also the gradient
};

// The rotation angles of a shard's positions. They do not depend on how sequences are cut.
class Rotary {
 public:
  Rotary(const SequenceShard& shard, std::int64_t head_size, float base);

  // Rotates x [T, heads · head_size], the shard's tokens, in place.
  void turn(Compute& compute, const TensorView& x, Turn direction) const;

 private:
  std::int64_t count_;            // positions
  std::int64_t half_;             // pairs per head
  std::vector<float> cosines_{};  // [count, half]
  std::vector<float> sines_{};    // [count, half]
};

}  // namespace switchyard::train
