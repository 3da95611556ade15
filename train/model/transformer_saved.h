// SPDX-License-Identifier: Apache-2.0
// The values that a model's forward saves for its backward.
#pragma once

#include <string_view>
#include <vector>

#include "model/attention.h"
#include "model/transformer.h"
#include "switchyard/moe_layer.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// The values saved for one layer. Normed rows are kept besides inputs, since the products of
// backward read them.
struct Transformer::LayerSaved {
  Tensor x;  // [T, H] the layer's input
  Tensor attention_rms;
  Tensor attention_normed;
  AttentionSaved attention;
  Tensor feed_forward_x;  // [T, H] after attention
  Tensor feed_forward_rms;
  Tensor feed_forward_normed;
  SavedForBackward moe;
  Tensor dense_inner;
};

struct Transformer::Saved {
  std::vector<LayerSaved> layers;
  Tensor x;  // [T, H] the last layer's output
  Tensor rms;
  Tensor normed;
};

// Stages that consist mostly of matrix products.
constexpr std::string_view kMoeExperts = "MoE experts";
constexpr std::string_view kMoeShared = "MoE shared";
constexpr std::string_view kDenseFeedForward = "dense feed-forward";

inline Tensor floats(const Shape& shape) { return {shape, Dtype::f32}; }

}  // namespace switchyard::train
