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
  // Of tokens, those.
  SourceRows of(const SourceRows& rows, std::int64_t count, std::int64_t columns);
  // Copies are evenly spaced. For one call.
  GroupMatrices of(const GroupMatrices& matrices);

 private:
  Context& context_;
  std::vector<TensorView> copies_;
  std::vector<MatrixRef> refs_;
};

// A result whose own memory bulk stores cannot address is made elsewhere, and copied there and
// back: rows that no kernel writes keep what they hold.
class AlignedResult {
 public:
  // bf16 [count, columns]; no data: no result.
  AlignedResult(const Rows& result, std::int64_t count, std::int64_t columns, Context& context);

  const Rows& rows() const { return rows_; }
  // After the last launch that writes it.
  void finish();

 private:
  Context& context_;
  Rows result_;
  Rows rows_;
  std::int64_t count_;
  std::int64_t columns_;
  TensorView memory_;
};

}  // namespace switchyard::cuda::hopper
