// SPDX-License-Identifier: Apache-2.0
// Grouped products: uses the Hopper kernels where they fit and falls back to the portable ones.
#include "device/cuda/grouped_gemm.h"

#include "core/require.h"
#include "device/cuda/portable/portable_gemm.h"

namespace switchyard::cuda {
namespace {

template <typename Gemm>
void multiply_groups(const Gemm& args, Context& context) {
  if (hopper::grouped_gemm(args, context)) return;
  if constexpr (requires { args.bias_factors; }) {
    check_invariant(args.bias_factors.sources == nullptr,
                    "the factors of a bias are given by source where only rows have factors");
  }
  if (args.dtype == Dtype::bf16) {
    portable::grouped_gemm<Dtype::bf16>(args, context);
  } else {
    portable::grouped_gemm<Dtype::f32>(args, context);
  }
}

}  // namespace

void grouped_gemm(const ForwardGemm& args, Context& context) { multiply_groups(args, context); }
void grouped_gemm(const InputGradientGemm& args, Context& context) {
  multiply_groups(args, context);
}
void grouped_gemm(const WeightGradientGemm& args, Context& context) {
  multiply_groups(args, context);
}

}  // namespace switchyard::cuda
