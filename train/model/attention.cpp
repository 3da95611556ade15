// SPDX-License-Identifier: Apache-2.0
#include "model/attention.h"

#include <array>

#include "model/causal_attention.h"
#include "model/rotary.h"

namespace switchyard::train {
namespace {

// One item each for queries, keys and values.
template <typename View>
using Thirds = std::array<View, 3>;

// Splits [3·H, H] into three views [H, H].
template <typename View>
Thirds<View> thirds_of(const View& qkv) {
  const auto hidden = qkv.shape()[1];
  return {qkv.slice(0, hidden), qkv.slice(hidden, 2 * hidden), qkv.slice(2 * hidden, 3 * hidden)};
}

// Views [batch, tokens, H] as [batch · tokens, H].
template <typename View>
View flat(const View& view) {
  const auto& shape = view.shape();
  return {view.data(), view.dtype(), {shape[0] * shape[1], shape[2]}, shape[2], view.owner()};
}

Thirds<Matmul> projections(const ConstTensorView& x, const Thirds<ConstTensorView>& weights,
                           const Thirds<TensorView>& out) {
  Thirds<Matmul> products;
  for (std::size_t i = 0; i < products.size(); ++i) {
    products[i] = {.a = x, .b = weights[i], .c = out[i], .b_layout = MatrixLayout::transposed};
  }
  return products;
}

void projections_backward(Compute& compute, const AttentionWeights& weights,
                          const Attention::Backward& args, const Thirds<TensorView>& d_out) {
  const auto gradients = thirds_of(args.gradients.qkv);
  Thirds<Matmul> products;
  for (std::size_t i = 0; i < products.size(); ++i) {
    products[i] = {
        .a = d_out[i], .b = args.x, .c = gradients[i], .a_layout = MatrixLayout::transposed};
  }
  compute.multiply(products);
  // These run one after the other, since all three add to d_x.
  auto mode = GradientMode::overwrite;
  const auto matrices = thirds_of(weights.qkv);
  for (std::size_t i = 0; i < products.size(); ++i) {
    compute.multiply({.a = d_out[i], .b = matrices[i], .c = args.d_x, .mode = mode});
    mode = GradientMode::accumulate;
  }
}

}  // namespace

void Attention::forward(Compute& compute, const AttentionWeights& weights,
                        const SequenceShard& shard, const ConstTensorView& x, const TensorView& y,
                        AttentionSaved& saved) const {
  const Shape rows{shard.num_tokens(), shape_.hidden};
  const Shape piece{shard.batch(), shard.count(), shape_.hidden};
  // If sequences are not cut, this rank's keys and values are all there are.
  const bool is_whole = shard.sp_size() == 1;
  Tensor own_keys;
  Tensor own_values;
  Tensor& keys = is_whole ? saved.keys : own_keys;
  Tensor& values = is_whole ? saved.values : own_values;
  saved.queries = Tensor(rows, Dtype::f32);
  saved.mixed = Tensor(rows, Dtype::f32);
  keys = Tensor(piece, Dtype::f32);
  values = Tensor(piece, Dtype::f32);
  const Thirds<TensorView> qkv{saved.queries.view(), flat(keys.view()), flat(values.view())};
  compute.multiply(projections(x, thirds_of(weights.qkv), qkv));
  const Rotary rotary(shard, shape_.hidden / shape_.heads, shape_.rotary_base);
  rotary.turn(compute, qkv[0], Turn::forward);
  rotary.turn(compute, qkv[1], Turn::forward);
  if (!is_whole) {
    saved.keys = gather_sequence(sp_, shard, qkv[1]);
    saved.values = gather_sequence(sp_, shard, qkv[2]);
  }
  causal_attention(compute, {.shard = shard,
                             .heads = shape_.heads,
                             .queries = saved.queries,
                             .keys = flat(saved.keys.view()),
                             .values = flat(saved.values.view()),
                             .mixed = saved.mixed});
  compute.multiply({.a = saved.mixed,
                    .b = weights.out,
                    .c = y,
                    .b_layout = MatrixLayout::transposed,
                    .mode = GradientMode::accumulate});
}

void Attention::backward(Compute& compute, const AttentionWeights& weights,
                         const SequenceShard& shard, const AttentionSaved& saved,
                         const Backward& args) const {
  Tensor d_mixed(saved.mixed.shape(), Dtype::f32);
  const std::array<Matmul, 2> of_out{Matmul{.a = args.d_y, .b = weights.out, .c = d_mixed},
                                     Matmul{.a = args.d_y,
                                            .b = saved.mixed,
                                            .c = args.gradients.out,
                                            .a_layout = MatrixLayout::transposed}};
  compute.multiply(of_out);

  Tensor d_queries(saved.queries.shape(), Dtype::f32);
  Tensor d_keys = Tensor::zeros(saved.keys.shape(), Dtype::f32);
  Tensor d_values = Tensor::zeros(saved.values.shape(), Dtype::f32);
  causal_attention_backward(compute, {.shard = shard,
                                      .heads = shape_.heads,
                                      .queries = saved.queries,
                                      .keys = flat(saved.keys.view()),
                                      .values = flat(saved.values.view()),
                                      .mixed = saved.mixed,
                                      .d_mixed = d_mixed,
                                      .d_queries = d_queries,
                                      .d_keys = flat(d_keys.view()),
                                      .d_values = flat(d_values.view())});
  Thirds<TensorView> d_qkv{d_queries.view(), flat(d_keys.view()), flat(d_values.view())};
  if (shard.sp_size() > 1) {
    d_qkv[1] = gather_sequence_backward_sum(sp_, shard, d_keys).view();
    d_qkv[2] = gather_sequence_backward_sum(sp_, shard, d_values).view();
  }
  const Rotary rotary(shard, shape_.hidden / shape_.heads, shape_.rotary_base);
  rotary.turn(compute, d_qkv[0], Turn::back);
  rotary.turn(compute, d_qkv[1], Turn::back);
  projections_backward(compute, weights, args, d_qkv);
}

}  // namespace switchyard::train
