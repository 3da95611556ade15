// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "common/random.h"

namespace switchyard::train {
namespace {

// Fills `values` with uniform random numbers in ±bound.
void fill(const TensorView& values, std::string_view name, std::uint64_t seed, double bound) {
  const auto own_seed = seed_of(name, seed);
  std::uint64_t i = 0;
  for (float& v : values.span<float>()) {
    v = static_cast<float>((2.0 * random_unit(own_seed, i++) - 1.0) * bound);
  }
}

void set_ones(const TensorView& values) { std::ranges::fill(values.span<float>(), 1.0F); }

std::int64_t dense_elements(const ModelConfig& c) {
  std::int64_t elements = (c.tied ? 1 : 2) * kVocabulary * c.hidden + c.hidden;
  for (int layer = 0; layer < c.layers; ++layer) {
    elements += 2 * c.hidden + 4 * c.hidden * c.hidden;
    if (!c.has_experts(layer)) elements += 3 * c.hidden * c.dense_intermediate;
  }
  return elements;
}

void append_expert(std::vector<ParameterView>& views, const std::string& name,
                   const ExpertViews& tensors, int layer, int expert) {
  views.push_back({name + "gate_proj", tensors.gate, true, layer, expert});
  views.push_back({name + "up_proj", tensors.up, true, layer, expert});
  views.push_back({name + "down_proj", tensors.down, true, layer, expert});
}

void append_block(std::vector<ParameterView>& views, MoeBlock& block, int layer) {
  const MoeViews& tensors = block.parameters.views();
  const auto name = block.name + ".";
  views.push_back({name + "gate", tensors.router.gate, true, layer});
  const auto ids = block.placement.experts_of(block.rank());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    append_expert(views, fmt::format("{}experts.{}.", name, ids[i]), tensors.experts[i], layer,
                  ids[i]);
  }
  if (tensors.shared.up.data() != nullptr) {
    append_expert(views, name + "shared_expert.", tensors.shared, layer, -1);
  }
}

}  // namespace

MoeLayerOptions moe_options(const ModelConfig& c) {
  const bool by_bias = c.balance == Balance::bias;
  return {.hidden = c.hidden,
          .intermediate = c.intermediate,
          .router = {.num_experts = c.experts,
                     .top_k = c.top_k,
                     .score = by_bias ? ScoreFunction::sigmoid : ScoreFunction::softmax,
                     .score_bias = by_bias ? ScoreBias::choice : ScoreBias::none},
          .shared_intermediate = c.shared_intermediate,
          .losses = {.balance = c.balance == Balance::loss ? BalanceLoss::batch : BalanceLoss::none,
                     .z = c.z_weight > 0.0F},
          // One sequence always fits; run_step() raises the capacity when training needs more.
          .sizing =
              c.sizing == BufferSizing::bounded ? Sizing::bounded(c.context * c.top_k) : Sizing{}};
}

ParameterSet::ParameterSet(const ModelConfig& config) : ParameterSet(config, nullptr) {}

ParameterSet::ParameterSet(const ModelConfig& config, const std::vector<MoeBlock>* divided)
    : config_(config), dense_(Tensor::zeros({dense_elements(config)}, Dtype::f32)) {
  lay_out();
  const auto whole = ExpertPlacement::contiguous(config.experts, 1);
  for (int layer = 0; layer < config.layers; ++layer) {
    if (!config.has_experts(layer)) continue;
    const auto index = blocks_.size();
    layers_[static_cast<std::size_t>(layer)].moe = static_cast<int>(index);
    Communicator* const comm = divided == nullptr ? nullptr : (*divided)[index].comm;
    const auto& placement = divided == nullptr ? whole : (*divided)[index].placement;
    const int rank = comm == nullptr ? 0 : comm->rank();
    blocks_.push_back({.name = fmt::format("layers.{}.mlp", layer),
                       .parameters = MoeParameters(moe_options(config), placement, rank),
                       .placement = placement,
                       .comm = comm});
  }
}

TensorView ParameterSet::take(std::int64_t& offset, const Shape& shape) {
  const auto all = dense_.view();
  TensorView part(all.row(offset), Dtype::f32, shape, shape.row_elements(), all.owner());
  offset += shape.num_elements();
  return part;
}

void ParameterSet::lay_out() {
  std::int64_t at = 0;
  const auto h = config_.hidden;
  embedding_ = take(at, {kVocabulary, h});
  head_ = config_.tied ? embedding_ : take(at, {kVocabulary, h});
  final_norm_ = take(at, {h});
  for (int layer = 0; layer < config_.layers; ++layer) {
    Layer parts;
    parts.attention_norm = take(at, {h});
    parts.attention = {.qkv = take(at, {3 * h, h}), .out = take(at, {h, h})};
    parts.feed_forward_norm = take(at, {h});
    if (!config_.has_experts(layer)) {
      const auto i = config_.dense_intermediate;
      parts.dense = {.gate = take(at, {i, h}), .up = take(at, {i, h}), .down = take(at, {h, i})};
    }
    layers_.push_back(parts);
  }
}

ParameterSet ParameterSet::random(const ModelConfig& config, std::uint64_t seed, Mesh& mesh,
                                  const std::vector<std::string>& expert_axes) {
  ParameterSet set(config);
  // Matrices whose output is added to the residual start smaller in a model with more layers.
  const double added = 1.0 / std::sqrt(2.0 * config.layers);
  for (const ParameterView& view : set.views()) {
    if (view.values.shape().rank() == 1) {
      set_ones(view.values);
    } else {
      const bool is_table = view.layer < 0;
      const bool is_added = view.name.ends_with(".out") || view.name.ends_with("down_proj");
      const double fan_in = static_cast<double>(view.values.shape()[1]);
      const double bound = is_table ? 0.05 : (is_added ? added : 1.0) * std::sqrt(3.0 / fan_in);
      fill(view.values, view.name, seed, bound);
    }
  }
  apply_expert_parallel(set, &mesh, expert_axes);
  return set;
}

ParameterSet ParameterSet::like() const { return {config_, &blocks_}; }

std::vector<MoeBlock*> ParameterSet::moe_blocks() {
  std::vector<MoeBlock*> result;
  for (MoeBlock& block : blocks_) result.push_back(&block);
  return result;
}

std::vector<ParameterView> ParameterSet::views() {
  std::vector<ParameterView> views;
  views.push_back({"embedding", embedding_, true});
  if (!config_.tied) views.push_back({"head", head_, true});
  views.push_back({"final_norm", final_norm_});
  for (int i = 0; i < config_.layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    const auto name = fmt::format("layers.{}.", i);
    views.push_back({name + "attention_norm", layer.attention_norm, false, i});
    views.push_back({name + "attention.qkv", layer.attention.qkv, true, i});
    views.push_back({name + "attention.out", layer.attention.out, true, i});
    views.push_back({name + "feed_forward_norm", layer.feed_forward_norm, false, i});
    if (layer.moe < 0) {
      append_expert(views, name + "mlp.", layer.dense, i, -1);
    } else {
      append_block(views, blocks_[static_cast<std::size_t>(layer.moe)], i);
    }
  }
  return views;
}

}  // namespace switchyard::train
