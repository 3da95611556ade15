// The grouped products of f32, by multiply-adds of f32, without TF32.
#include "device/cuda/portable/portable_gemm.cuh"

namespace switchyard::cuda::portable {

template void grouped_gemm<Dtype::f32>(const ForwardGemm& args, Context& context);
template void grouped_gemm<Dtype::f32>(const InputGradientGemm& args, Context& context);
template void grouped_gemm<Dtype::f32>(const WeightGradientGemm& args, Context& context);

}  // namespace switchyard::cuda::portable
