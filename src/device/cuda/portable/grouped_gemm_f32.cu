// SPDX-License-Identifier: Apache-2.0
// Instantiates the f32 grouped products, with f32 FMA and no TF32.
#include "device/cuda/portable/portable_gemm.cuh"

namespace switchyard::cuda::portable {

template void grouped_gemm<Dtype::f32>(const ForwardGemm& args, Context& context);
template void grouped_gemm<Dtype::f32>(const InputGradientGemm& args, Context& context);
template void grouped_gemm<Dtype::f32>(const WeightGradientGemm& args, Context& context);

}  // namespace switchyard::cuda::portable
