// SPDX-License-Identifier: Apache-2.0
// Instantiates the bf16 grouped products, on tensor cores (sm_80 and up).
#include "device/cuda/portable/portable_gemm.cuh"

namespace switchyard::cuda::portable {

template void grouped_gemm<Dtype::bf16>(const ForwardGemm& args, Context& context);
template void grouped_gemm<Dtype::bf16>(const InputGradientGemm& args, Context& context);
template void grouped_gemm<Dtype::bf16>(const WeightGradientGemm& args, Context& context);

}  // namespace switchyard::cuda::portable
