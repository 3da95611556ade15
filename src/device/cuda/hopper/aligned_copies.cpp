#include "device/cuda/hopper/aligned_copies.h"

#include "device/cuda/hopper/tensor_maps.h"
#include "device/cuda/kernels.h"

namespace switchyard::cuda::hopper {

Rows AlignedCopies::of(const Rows& rows, std::int64_t count, std::int64_t columns) {
  if (can_map(rows)) return rows;
  const ConstTensorView from(static_cast<const std::byte*>(rows.data), Dtype::bf16,
                             {count, columns}, rows.stride, nullptr, Memory::gpu);
  const TensorView copy = copies_.emplace_back(context_.take({count, columns}, Dtype::bf16));
  copy_rows(from, copy, context_);
  return {copy.data(), copy.row_stride()};
}

GroupMatrices AlignedCopies::of(const GroupMatrices& matrices) {
  if (can_map(matrices)) return matrices;
  const auto count = static_cast<std::int64_t>(matrices.refs.size());
  const TensorView all =
      copies_.emplace_back(context_.take({count * matrices.rows, matrices.columns}, Dtype::bf16));
  for (const MatrixRef& ref : matrices.refs) {
    const ConstTensorView from(static_cast<const std::byte*>(ref.data), Dtype::bf16,
                               {matrices.rows, matrices.columns}, ref.row_stride, nullptr,
                               Memory::gpu);
    const auto first = static_cast<std::int64_t>(refs_.size()) * matrices.rows;
    const TensorView copy = all.slice(first, first + matrices.rows);
    copy_rows(from, copy, context_);
    refs_.push_back({copy.data(), copy.row_stride()});
  }
  GroupMatrices result = matrices;
  result.refs = refs_;
  return result;
}

}  // namespace switchyard::cuda::hopper
