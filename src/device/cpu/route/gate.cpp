// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/route/gate.h"

#include <algorithm>
#include <cstring>

#include "device/cpu/experts/panels.h"
#include "device/cpu/gemm/gemm.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

// The number of tokens in each product that is accumulated into the gate's gradient.
constexpr std::int64_t kTokensAtOnce = 2048;

const std::byte* bytes_of(const float* values) {
  return reinterpret_cast<const std::byte*>(values);
}
std::byte* bytes_of(float* values) { return reinterpret_cast<std::byte*>(values); }

void widen_row(float* to, const std::byte* from, Dtype dtype, std::int64_t elements) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(elements) * sizeof(float));
  } else {
    element_kernels().widen(to, from, elements);
  }
}

// Returns columns of a matrix as f32: in place if possible, or copied to scratch and padded with
// zeros to `padded_rows` rows.
MatrixIn as_f32(const ConstTensorView& rows, std::int64_t first_column, std::int64_t columns,
                std::int64_t padded_rows, Scratch& scratch) {
  const auto offset = first_column * size_of(rows.dtype());
  if (rows.dtype() == Dtype::f32 && rows.rows() == padded_rows) {
    return {rows.data() + offset, rows.row_stride()};
  }
  float* copy = scratch.take_floats(padded_rows * columns);
  for (std::int64_t r = 0; r < rows.rows(); ++r) {
    widen_row(copy + r * columns, rows.row(r) + offset, rows.dtype(), columns);
  }
  std::fill_n(copy + rows.rows() * columns, (padded_rows - rows.rows()) * columns, 0.0F);
  return {bytes_of(copy), columns};
}

}  // namespace

Gate::Gate(const RouterWeights& weights, MemoryCache& memory) : gate_(weights.gate) {
  if (gate_.dtype() != Dtype::f32) {
    const auto wide = memory.take(gate_.shape(), Dtype::f32);
    for (std::int64_t e = 0; e < gate_.rows(); ++e) {
      widen_row(reinterpret_cast<float*>(wide.row(e)), gate_.row(e), gate_.dtype(),
                gate_.shape()[1]);
    }
    gate_ = wide;
  }
  if (!is_given(weights.gate_bias)) return;
  for (std::int64_t e = 0; e < gate_.rows(); ++e) bias_.push_back(element(weights.gate_bias, e));
}

float* Gate::logits(const ConstTensorView& x, std::int64_t first, std::int64_t last,
                    Scratch& scratch) const {
  const auto hidden = x.shape()[1];
  const auto rows = padded_tokens(last - first);
  float* out = scratch.take_floats(rows * num_experts());
  gemm({.m = rows,
        .n = num_experts(),
        .k = hidden,
        .a = as_f32(x.slice(first, last), 0, hidden, rows, scratch),
        .b = {gate_.data(), gate_.row_stride(), Layout::transposed},
        .c = {bytes_of(out), num_experts()}},
       scratch);
  if (!bias_.empty()) {
    for (std::int64_t r = 0; r < rows; ++r) {
      element_kernels().f32.add(bytes_of(out + r * num_experts()), bias_.data(), num_experts());
    }
  }
  return out;
}

void Gate::add_d_x(const float* d_logits, std::int64_t first, std::int64_t last,
                   const TensorView& d_x, Scratch& scratch) const {
  const auto hidden = d_x.shape()[1];
  const auto rows = padded_tokens(last - first);
  float* sums = scratch.take_floats(rows * hidden);
  gemm({.m = rows,
        .n = hidden,
        .k = num_experts(),
        .a = {bytes_of(d_logits), num_experts()},
        .b = {gate_.data(), gate_.row_stride()},
        .c = {bytes_of(sums), hidden}},
       scratch);
  for (std::int64_t t = first; t < last; ++t) {
    element_kernels(d_x.dtype()).add(d_x.row(t), sums + (t - first) * hidden, hidden);
  }
}

void gate_gradient(const GateGradient& args, std::int64_t first, std::int64_t last,
                   Scratch& scratch) {
  const auto experts = args.gradient.rows();
  const auto columns = last - first;
  float* sums = scratch.take_floats(experts * columns);
  std::fill_n(sums, experts * columns, 0.0F);
  for (std::int64_t t = 0; t < args.x.rows(); t += kTokensAtOnce) {
    const auto end = std::min(t + kTokensAtOnce, args.x.rows());
    const auto mark = scratch.mark();
    gemm({.m = experts,
          .n = columns,
          .k = end - t,
          .a = {args.d_logits.row(t), experts, Layout::transposed},
          .b = as_f32(args.x.slice(t, end), first, columns, end - t, scratch),
          .c = {bytes_of(sums), columns},
          .accumulate = true},
         scratch);
    scratch.release(mark);
  }
  write_gradient(args.gradient, {first, last}, sums, args.mode);
}

}  // namespace switchyard::cpu
