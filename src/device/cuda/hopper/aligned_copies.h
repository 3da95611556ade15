// Stand-ins for tensors that bulk copies cannot address, so that where a tensor lies decides
// neither which kernel runs nor any bit.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda::hopper {

// What one product reads, as long as this object is there. What can be mapped stands for itself;
// all else is copied, which takes time.
class AlignedCopies {
 public:
  explicit AlignedCopies(Context& context) : context_(context) {}

  // bf16 [count, columns]
  Rows of(const Rows& rows, std::int64_t count, std::int64_t columns);
  // Copies are evenly spaced. For one call.
  GroupMatrices of(const GroupMatrices& matrices);

 private:
  Context& context_;
  std::vector<TensorView> copies_;
  std::vector<MatrixRef> refs_;
};

}  // namespace switchyard::cuda::hopper
