// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/hopper/aligned_copies.h"

#include "device/cuda/hopper/tensor_maps.h"
#include "device/cuda/kernels.h"

namespace switchyard::cuda::hopper {
namespace {

TensorView view_of(const Rows& rows, std::int64_t count, std::int64_t columns) {
  return {static_cast<std::byte*>(const_cast<void*>(rows.data)),
          Dtype::bf16,
          {count, columns},
          rows.stride,
          nullptr,
          Memory::gpu};
}

}  // namespace

Rows AlignedCopies::of(const Rows& rows, std::int64_t count, std::int64_t columns) {
  if (can_map(rows)) return rows;
  const TensorView copy = copies_.emplace_back(context_.take({count, columns}, Dtype::bf16));
  copy_rows(view_of(rows, count, columns), copy, context_);
  return {copy.data(), copy.row_stride()};
}

SourceRows AlignedCopies::of(const SourceRows& rows, std::int64_t count, std::int64_t columns) {
  SourceRows result = rows;
  const Rows& base = rows;
  static_cast<Rows&>(result) = of(base, rows.sources == nullptr ? count : rows.num_tokens, columns);
  return result;
}

GroupMatrices AlignedCopies::of(const GroupMatrices& matrices) {
  if (can_map(matrices)) return matrices;
  const auto count = static_cast<std::int64_t>(matrices.refs.size());
  const TensorView all =
      copies_.emplace_back(context_.take({count * matrices.rows, matrices.columns}, Dtype::bf16));
  for (const MatrixRef& ref : matrices.refs) {
    const auto first = static_cast<std::int64_t>(refs_.size()) * matrices.rows;
    const TensorView copy = all.slice(first, first + matrices.rows);
    copy_rows(view_of({ref.data, ref.row_stride}, matrices.rows, matrices.columns), copy, context_);
    refs_.push_back({copy.data(), copy.row_stride()});
  }
  GroupMatrices result = matrices;
  result.refs = refs_;
  return result;
}

AlignedResult::AlignedResult(const Rows& result, std::int64_t count, std::int64_t columns,
                             Context& context)
    : context_(context), result_(result), rows_(result), count_(count), columns_(columns) {
  if (result.data == nullptr || can_map(result)) return;
  memory_ = context.take({count, columns}, Dtype::bf16);
  copy_rows(view_of(result, count, columns), memory_, context);
  rows_ = {memory_.data(), memory_.row_stride()};
}

void AlignedResult::finish() {
  if (rows_.data == result_.data) return;
  copy_rows(view_of(rows_, count_, columns_), view_of(result_, count_, columns_), context_);
}

}  // namespace switchyard::cuda::hopper
