// SPDX-License-Identifier: Apache-2.0
// Random weights and matching gradients, for tests of experts and layers.
#pragma once

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"
#include "switchyard/moe_parameters.h"

namespace switchyard::testing {

// Values are in ±1/√fan-in. The views own their memory.
ExpertWeights random_expert(Random& random, const ExpertsOptions& options, Biases biases);
// Holds all experts, and the score bias if the options have one. With biases, also those of the
// gate and the shared expert.
MoeWeights random_layer(Random& random, const MoeLayerOptions& options, Biases biases);
// Returns the part that one rank of a placement holds.
MoeWeights part_of(const MoeWeights& weights, const ExpertPlacement& placement, int rank);

// Makes a tensor of NaNs for every weight that is given, in the weight's dtype or f32.
enum class GradientDtype { as_weights, f32 };
ExpertGradients gradients_for(const ExpertWeights& weights,
                              GradientDtype dtype = GradientDtype::as_weights);
MoeGradients gradients_for(const MoeWeights& weights);

// Returns each tensor of an expert with its name.
template <typename View>
std::vector<std::pair<const char*, View>> named_tensors(const BasicExpertTensors<View>& e) {
  return {{"gate", e.gate},           {"up", e.up},           {"down", e.down},
          {"gate_bias", e.gate_bias}, {"up_bias", e.up_bias}, {"down_bias", e.down_bias}};
}

// Expects both to have the same tensors, and each to be near its reference in norm.
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
