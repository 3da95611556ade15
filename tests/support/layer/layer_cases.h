// SPDX-License-Identifier: Apache-2.0
// Small layers that cover every option, and the reference results of a step, for one rank on any
// device.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/layer/moe_tensors.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

struct LayerCase {
  std::string name;
  MoeLayerOptions options = {};
  Biases biases = Biases::none;
  std::int64_t num_tokens = 12;
  std::function<std::vector<std::int32_t>(std::int64_t tokens, std::int64_t top_k)> ids = nullptr;
  bool has_padding = false;
  RouterLosses d_losses = {};
};

// All tensors are in host memory.
struct CaseInput {
  explicit CaseInput(const LayerCase& c);

  MoeWeights weights;
  Tensor x, d_y;
  std::optional<Tensor> ids, valid;
};

// All tensors are in host memory.
struct LayerOutcome {
  Tensor y, d_x, d_weights, expert_ids, slots;
  MoeGradients gradients;
  RouterLosses losses;
};

// Runs forward and backward on one rank, with outputs filled with NaN beforehand.
LayerOutcome run_case(const LayerCase& c, const CaseInput& in, const Device& device);

void expect_same_bits(const LayerOutcome& a, const LayerOutcome& b);

// Compares everything with the reference; gradients by finite differences in double precision.
// Takes the assignments that capacity dropped from the plan.
void expect_reference(const LayerCase& c, const CaseInput& in, const LayerOutcome& actual,
                      double tolerance);

std::vector<LayerCase> router_cases();
std::vector<LayerCase> expert_cases();
std::vector<LayerCase> plan_cases();
std::vector<LayerCase> training_cases();
// Picks are given, since the reference would choose by unrounded logits.
std::vector<LayerCase> bf16_cases();

}  // namespace switchyard::testing
