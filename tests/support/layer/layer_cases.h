// Small layers with every option, and what the reference says of a step of them: for one rank on
// any device.
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

// Tensors of the host, all of them.
struct CaseInput {
  explicit CaseInput(const LayerCase& c);

  MoeWeights weights;
  Tensor x, d_y;
  std::optional<Tensor> ids, valid;
};

// Likewise.
struct LayerOutcome {
  Tensor y, d_x, d_weights, expert_ids, slots;
  MoeGradients gradients;
  RouterLosses losses;
};

// Forward and backward on one rank, into NaNs.
LayerOutcome run_case(const LayerCase& c, const CaseInput& in, const Device& device);

void expect_same_bits(const LayerOutcome& a, const LayerOutcome& b);

// All of it, by differences in double precision. What capacity dropped is taken from the plan.
void expect_reference(const LayerCase& c, const CaseInput& in, const LayerOutcome& actual,
                      double tolerance);

std::vector<LayerCase> router_cases();
std::vector<LayerCase> expert_cases();
std::vector<LayerCase> plan_cases();
std::vector<LayerCase> training_cases();
// Picks are given: the reference's own would be those of logits that were never rounded.
std::vector<LayerCase> bf16_cases();

}  // namespace switchyard::testing
