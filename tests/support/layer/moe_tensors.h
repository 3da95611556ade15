// Random weights and the gradients that belong to them, for tests of experts and layers.
#pragma once

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"
#include "switchyard/moe_parameters.h"

namespace switchyard::testing {

// In ±1/√fan-in; views that own their memory.
ExpertWeights random_expert(Random& random, const ExpertsOptions& options, Biases biases);
// All experts of the router, the score bias where the options have one, and with biases the gate's
// and the shared expert's too.
MoeWeights random_layer(Random& random, const MoeLayerOptions& options, Biases biases);
// What one rank of a placement holds of them.
MoeWeights part_of(const MoeWeights& weights, const ExpertPlacement& placement, int rank);

// A tensor of NaNs for every weight that is given, of its dtype or f32.
enum class GradientDtype { as_weights, f32 };
ExpertGradients gradients_for(const ExpertWeights& weights,
                              GradientDtype dtype = GradientDtype::as_weights);
MoeGradients gradients_for(const MoeWeights& weights);

// Each tensor of an expert, beside its name.
template <typename View>
std::vector<std::pair<const char*, View>> named_tensors(const BasicExpertTensors<View>& e) {
  return {{"gate", e.gate},           {"up", e.up},           {"down", e.down},
          {"gate_bias", e.gate_bias}, {"up_bias", e.up_bias}, {"down_bias", e.down_bias}};
}

// Every tensor that is given is near its reference in norm, and both have the same ones.
void expect_near(const ExpertGradients& actual, const ReferenceExpert& expected, double tolerance);
template <typename View>
void expect_same_bits(const BasicExpertTensors<View>& actual,
                      const BasicExpertTensors<View>& expected) {
  const auto actual_tensors = named_tensors(actual);
  const auto expected_tensors = named_tensors(expected);
  for (std::size_t i = 0; i < actual_tensors.size(); ++i) {
    EXPECT_TRUE(same_bits(actual_tensors[i].second, expected_tensors[i].second))
        << actual_tensors[i].first;
  }
}

}  // namespace switchyard::testing
