// SPDX-License-Identifier: Apache-2.0
// One layer of the model: attention, then experts or a dense feed-forward. Each follows a norm and
// is added to the residual.
#include <chrono>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/transformer.h"
#include "model/transformer_saved.h"

namespace switchyard::train {
namespace {

void add(Compute& compute, const Tensor& from, Tensor& to) {
  const auto source = from.span<float>();
  const auto target = to.span<float>();
  compute.for_each(
      static_cast<std::int64_t>(target.size()), [&](std::int64_t first, std::int64_t last) {
        for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i) {
          target[i] += source[i];
        }
      });
}

AttentionWeights weights_of(const AttentionViews& tensors) { return {tensors.qkv, tensors.out}; }
ExpertWeights weights_of(const ExpertViews& tensors) {
  return {.gate = tensors.gate, .up = tensors.up, .down = tensors.down};
}

// Puts all rows in one group, so that a layer without routing is a single expert.
struct OneGroup {
  explicit OneGroup(std::int64_t num_rows)
      : offsets(Tensor::from<std::int32_t>({2}, {0, static_cast<std::int32_t>(num_rows)})),
        rows(Tensor::from<std::int32_t>({1}, {static_cast<std::int32_t>(num_rows)})) {}
  RowGroups groups() const { return {.row_offsets = offsets, .group_rows = rows}; }

  Tensor offsets;
  Tensor rows;
};

// Adds stage times of a MoE layer. Backward counts with forward: "combine_backward" becomes "MoE
// combine".
void add_stages(StageTimes& times, const std::vector<LayerStats::Stage>& stages) {
  for (const auto& stage : stages) {
    std::string_view name = stage.name;
    for (const std::string_view end : {"_backward", "_again"}) {
      if (name.ends_with(end)) name.remove_suffix(end.size());
    }
    times.add("MoE " + std::string(name), stage.seconds);
  }
}

// Adds what this rank waits for each rank of a communicator during the object's life.
class CountedWaits {
 public:
  CountedWaits(const Communicator& comm, std::vector<double>& sums)
      : now_(comm.waited_for()), before_(now_.begin(), now_.end()), sums_(sums) {
    sums_.resize(now_.size());
  }
  ~CountedWaits() {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      sums_[i] += std::chrono::duration<double>(now_[i] - before_[i]).count();
    }
  }
  CountedWaits(const CountedWaits&) = delete;
  CountedWaits& operator=(const CountedWaits&) = delete;

 private:
  std::span<const std::chrono::nanoseconds> now_;
  std::vector<std::chrono::nanoseconds> before_;
  std::vector<double>& sums_;
};

}  // namespace

void Transformer::forward_layer(int layer, const TokenBatch& batch, Tensor& x, LayerSaved& saved,
                                Keeping keeping) {
  const auto& weights = values_.layers()[static_cast<std::size_t>(layer)];
  saved.attention_normed = norm(x, weights.attention_norm, saved.attention_rms);
  Tensor attended = x.clone();
  times_.timed("attention", [&] {
    attention_.forward(compute_, weights_of(weights.attention), batch.shard, saved.attention_normed,
                       attended, saved.attention);
  });
  saved.x = std::move(x);
  saved.feed_forward_normed = norm(attended, weights.feed_forward_norm, saved.feed_forward_rms);
  x = weights.moe >= 0 ? experts_forward(weights.moe, saved, keeping)
                       : dense_forward(weights.dense, saved);
  add(compute_, attended, x);
  saved.feed_forward_x = std::move(attended);
}

Tensor Transformer::experts_forward(int moe, LayerSaved& saved, Keeping keeping) {
  MoeLayer& layer = moe_[static_cast<std::size_t>(moe)];
  const MoeWeights weights = values_.blocks()[static_cast<std::size_t>(moe)].parameters.weights();
  if (keeping == Keeping::nothing) return layer.forward(weights, {.x = saved.feed_forward_normed});
  Tensor y = moe_times_.timed("forward", [&] {
    const CountedWaits waits(layer.communicator(), moe_waits_);
    return layer.forward(weights, {.x = saved.feed_forward_normed}, saved.moe);
  });
  add_stages(times_, layer.stats().forward);
  return y;
}

Tensor Transformer::dense_forward(const ExpertViews& tensors, LayerSaved& saved) {
  const auto num_tokens = saved.feed_forward_normed.rows();
  const ExpertWeights weights = weights_of(tensors);
  Tensor y = floats({num_tokens, config_.hidden});
  saved.dense_inner = floats({num_tokens, 2 * config_.dense_intermediate});
  const OneGroup all(num_tokens);
  times_.timed(kDenseFeedForward, [&] {
    dense_.forward({&weights, 1}, all.groups(), {.rows = saved.feed_forward_normed},
                   {.out = y, .inner = saved.dense_inner});
  });
  return y;
}

void Transformer::backward_layer(int layer, const TokenBatch& batch, LayerSaved& saved,
                                 Tensor& d_x) {
  const auto& weights = values_.layers()[static_cast<std::size_t>(layer)];
  const auto& gradients = gradients_.layers()[static_cast<std::size_t>(layer)];
  Tensor d_normed = floats(d_x.shape());
  if (weights.moe >= 0) {
    experts_backward(weights.moe, saved, d_x, d_normed);
  } else {
    dense_backward(layer, saved, d_x, d_normed);
  }
  norm_backward({saved.feed_forward_x, weights.feed_forward_norm, saved.feed_forward_rms, d_normed,
                 gradients.feed_forward_norm},
                d_x);
  times_.timed("attention", [&] {
    attention_.backward(compute_, weights_of(weights.attention), batch.shard, saved.attention,
                        {.x = saved.attention_normed,
                         .d_y = d_x,
                         .d_x = d_normed,
                         .gradients = gradients.attention});
  });
  norm_backward(
      {saved.x, weights.attention_norm, saved.attention_rms, d_normed, gradients.attention_norm},
      d_x);
}

void Transformer::experts_backward(int moe, LayerSaved& saved, const Tensor& d_y,
                                   Tensor& d_normed) {
  MoeLayer& layer = moe_[static_cast<std::size_t>(moe)];
  const auto index = static_cast<std::size_t>(moe);
  const auto share = 1.0F / static_cast<float>(moe_.size());
  const RouterLosses d_losses{
      .balance = config_.balance == Balance::loss ? share * config_.balance_weight : 0.0F,
      .z = share * config_.z_weight};
  moe_times_.timed("backward", [&] {
    const CountedWaits waits(layer.communicator(), moe_waits_);
    layer.backward(values_.blocks()[index].parameters.weights(), saved.moe,
                   {.d_y = d_y, .d_losses = d_losses},
                   {.d_x = d_normed, .gradients = gradients_.blocks()[index].parameters.views()});
  });
  const LayerStats stats = layer.stats();
  add_stages(times_, stats.backward);
  moe_bytes_ += stats.bytes_on_wire;
  moe_rows_ += stats.rows_by_rank[static_cast<std::size_t>(layer.communicator().rank())];
}

void Transformer::dense_backward(int layer, LayerSaved& saved, const Tensor& d_y,
                                 Tensor& d_normed) {
  const auto index = static_cast<std::size_t>(layer);
  const ExpertWeights weights = weights_of(values_.layers()[index].dense);
  const ExpertGradients& gradients = gradients_.layers()[index].dense;
  const OneGroup all(d_y.rows());
  times_.timed(kDenseFeedForward, [&] {
    dense_.backward({&weights, 1}, all.groups(),
                    {.rows = saved.feed_forward_normed, .inner = saved.dense_inner, .d_out = d_y},
                    {.d_rows = d_normed, .gradients = {&gradients, 1}});
  });
}

}  // namespace switchyard::train
