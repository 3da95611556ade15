// SPDX-License-Identifier: Apache-2.0
// The grouped products on any GPU (sm_80 and up), for any sizes.
#pragma once

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda::portable {

// kDtype must be the dtype of `args`.
template <Dtype kDtype>
void grouped_gemm(const ForwardGemm& args, Context& context);
template <Dtype kDtype>
void grouped_gemm(const InputGradientGemm& args, Context& context);
template <Dtype kDtype>
void grouped_gemm(const WeightGradientGemm& args, Context& context);

}  // namespace switchyard::cuda::portable
