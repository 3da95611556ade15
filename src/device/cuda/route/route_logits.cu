// SPDX-License-Identifier: Apache-2.0
// The gate's logits: bf16 on tensor cores (wgmma on Hopper), everything else in plain f32.
#include <cuda_runtime.h>

#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_product.cuh"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_wgmma_logits.cuh"

namespace switchyard::cuda {
namespace {

// Up to 64 experts need only half a tile.
using FewLogitsShape = ProductShape<128, 64, 1, Runs::along_k, Runs::along_k>;
using LogitsShape = ProductShape<128, 128, 1, Runs::along_k, Runs::along_k, 3>;

// Adds the bias, if any, to a sum and stores the logit.
struct StoreLogit {
  float* logits;  // from take_logits
  std::int64_t row_stride;
  const void* bias;  // [E] or null
  bool bias_is_bf16;

  __device__ float bias_of(std::int64_t expert) const {
    return bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[expert])
                        : static_cast<const float*>(bias)[expert];
  }
  __device__ void operator()(std::int64_t token, std::int64_t expert, float sum) const {
    logits[token * row_stride + expert] = bias != nullptr ? sum + bias_of(expert) : sum;
  }
  __device__ void pair(std::int64_t token, std::int64_t expert, float2 sums, bool has_both) const {
    if (bias != nullptr) {
      sums.x += bias_of(expert);
      if (has_both) sums.y += bias_of(expert + 1);
    }
    *reinterpret_cast<float2*>(logits + token * row_stride + expert) = sums;
  }
};

template <typename Shape>
void launch_logits(const ConstTensorView& x, const ConstTensorView& gate, const StoreLogit& store,
                   Context& context) {
  const auto hidden = x.shape()[1];
  const Product<Shape> product{
      .a = {factor_of<__nv_bfloat16, Runs::along_k>(x)},
      .b = factor_of<__nv_bfloat16, Runs::along_k>(gate),
      .sizes = {.m = x.rows(), .n = gate.rows(), .k = hidden, .k_part = hidden}};
  launch_product(product, has_aligned_rows(x) && has_aligned_rows(gate), 1,
                 StorePairs<StoreLogit>{store, x.rows(), gate.rows()}, context);
}

void bf16_logits(const ConstTensorView& x, const ConstTensorView& gate, const StoreLogit& store,
                 Context& context) {
  if (hopper::gate::fits(context, x.shape()[1])) {
    hopper::gate::logits(x, gate, store, context);
  } else if (gate.rows() <= FewLogitsShape::kN) {
    launch_logits<FewLogitsShape>(x, gate, store, context);
  } else {
    launch_logits<LogitsShape>(x, gate, store, context);
  }
}

template <typename X, typename G>
void f32_logits(const ConstTensorView& x, const ConstTensorView& gate, const StoreLogit& store,
                Context& context) {
  const auto hidden = x.shape()[1];
  launch_simt_product(factor_of<X, Runs::along_k>(x), factor_of<G, Runs::along_k>(gate),
                      {.m = x.rows(), .n = gate.rows(), .k = hidden, .k_part = hidden}, 1, store,
                      context);
}

}  // namespace

TensorView take_logits(std::int64_t num_tokens, std::int64_t num_experts, Context& context) {
  const auto stride = (num_experts + 3) / 4 * 4;
  const TensorView all = context.take({num_tokens, stride}, Dtype::f32);
  return {all.data(), Dtype::f32, {num_tokens, num_experts}, stride, all.owner(), all.memory()};
}

void gate_logits(const ConstTensorView& x, const RouterWeights& weights, const TensorView& logits,
                 Context& context) {
  const StoreLogit store{reinterpret_cast<float*>(logits.data()), logits.row_stride(),
                         weights.gate_bias.data(), weights.gate_bias.dtype() == Dtype::bf16};
  const bool x_is_bf16 = x.dtype() == Dtype::bf16;
  const bool gate_is_bf16 = weights.gate.dtype() == Dtype::bf16;
  if (x_is_bf16 && gate_is_bf16) {
    bf16_logits(x, weights.gate, store, context);
  } else if (x_is_bf16) {
    f32_logits<__nv_bfloat16, float>(x, weights.gate, store, context);
  } else if (gate_is_bf16) {
    f32_logits<float, __nv_bfloat16>(x, weights.gate, store, context);
  } else {
    f32_logits<float, float>(x, weights.gate, store, context);
  }
}

}  // namespace switchyard::cuda
