// SPDX-License-Identifier: Apache-2.0
// Aligned copies of tensors that TMA cannot address, so that a tensor's alignment changes neither
// which kernel runs nor any bit of the result.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda::hopper {

// The inputs of one product, valid as long as this object lives. Tensors that TMA can address are
// returned as they are; others are copied, which takes time.
class AlignedCopies {
 public:
  explicit AlignedCopies(Context& context) : context_(context) {}

  // bf16 [count, columns]
  Rows of(const Rows& rows, std::int64_t count, std::int64_t columns);
  // If rows are read from tokens, copies the tokens.
  SourceRows of(const SourceRows& rows, std::int64_t count, std::int64_t columns);
  // Copies are evenly spaced. May be called only once per object.
  GroupMatrices of(const GroupMatrices& matrices);

 private:
  Context& context_;
  std::vector<TensorView> copies_;
  std::vector<MatrixRef> refs_;
};

// The output of a product. If TMA cannot address its memory, the kernels write to a scratch buffer
// instead. The old contents are copied in first, so rows that no kernel writes keep their values.
class AlignedResult {
 public:
  // bf16 [count, columns]. Null data means that there is no output.
  AlignedResult(const Rows& result, std::int64_t count, std::int64_t columns, Context& context);

  const Rows& rows() const { return rows_; }
  // Copies the scratch buffer back, if there is one. Call after the last launch that writes it.
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
