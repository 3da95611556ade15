// SPDX-License-Identifier: Apache-2.0
// Groups of random rows for experts, a forward and backward pass over them, and the reference
// results.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "support/layer/moe_tensors.h"
#include "switchyard/device.h"
#include "switchyard/experts.h"

namespace switchyard::testing {

struct ExpertsProblem {
  ExpertsProblem(const ExpertsOptions& options, Biases biases, std::vector<std::int32_t> group_rows,
                 std::int64_t alignment = 1);

  RowGroups groups() const { return {row_offsets, group_rows, alignment}; }
  std::int64_t num_rows() const { return rows.rows(); }

  ExpertsOptions options;
  std::int64_t alignment;
  std::vector<ExpertWeights> weights;
  Tensor row_offsets, group_rows;
  // Padding is NaN. A row's values depend on its expert and its index there, not on the alignment.
  Tensor rows, row_weights, d_out;
};

// Turns the rows of a problem into copies of tokens, in random order.
struct TokensProblem {
  // Needs at least as many assignments as the problem has rows.
  TokensProblem(ExpertsProblem& problem, std::int64_t num_tokens, std::int64_t top_k);

  std::int64_t top_k;
  Tensor x, d_y;       // [T, H]; NaN where a token has no row
  Tensor weights;      // [T, K]; NaN where an assignment has no row
  Tensor row_sources;  // [R] i32; poisoned for padding
};

struct ExpertsResults {
  Tensor out, inner, d_rows, d_row_weights;  // padding is NaN
  std::vector<ExpertGradients> gradients;
};

struct ExpertsRun {
  Device device = {};
  InnerRows inner_rows = InnerRows::kept;
  GradientDtype gradient_dtype = GradientDtype::as_weights;
};
// Runs forward, keeping `inner`, and backward.
ExpertsResults run_experts(const ExpertsProblem& problem, const ExpertsRun& run = {});

// Returns the rows of the groups without padding, as with alignment 1.
Tensor without_pads(const ExpertsProblem& problem, const ConstTensorView& rows);
// True if everything between the groups is still NaN.
bool has_poisoned_pads(const ExpertsProblem& problem, const ConstTensorView& rows);

// Reference results for one expert's group.
Tensor reference_out(const ExpertsProblem& problem, std::size_t expert);
struct ReferenceGradients {
  Doubles d_rows, d_row_weights;
  ReferenceExpert weights;
};
ReferenceGradients reference_gradients(const ExpertsProblem& problem, std::size_t expert);

}  // namespace switchyard::testing
