// Groups of random rows for experts: a pass of theirs, and what the reference says about it.
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
  // Pads are NaN. The values of a row depend on its expert and its place there, not on alignment.
  Tensor rows, row_weights, d_out;
};

// Tokens that the rows of a problem are then copies of, in no order.
struct TokensProblem {
  // At least as many assignments as there are rows.
  TokensProblem(ExpertsProblem& problem, std::int64_t num_tokens, std::int64_t top_k);

  std::int64_t top_k;
  Tensor x, d_y;       // [T, H]; NaN where a token has no row
  Tensor weights;      // [T, K]; likewise
  Tensor row_sources;  // [R] i32; of pads no assignment at all
};

struct ExpertsResults {
  Tensor out, inner, d_rows, d_row_weights;  // pads are NaN
  std::vector<ExpertGradients> gradients;
};

struct ExpertsRun {
  Device device = {};
  InnerRows inner_rows = InnerRows::kept;
  GradientDtype gradient_dtype = GradientDtype::as_weights;
};
// Forward with `inner` kept, and backward.
ExpertsResults run_experts(const ExpertsProblem& problem, const ExpertsRun& run = {});

// The rows of the groups without their pads, as they would be with alignment 1.
Tensor without_pads(const ExpertsProblem& problem, const ConstTensorView& rows);
// Whether everything between the groups is still NaN.
bool has_poisoned_pads(const ExpertsProblem& problem, const ConstTensorView& rows);

// Of one expert's group.
Tensor reference_out(const ExpertsProblem& problem, std::size_t expert);
struct ReferenceGradients {
  Doubles d_rows, d_row_weights;
  ReferenceExpert weights;
};
ReferenceGradients reference_gradients(const ExpertsProblem& problem, std::size_t expert);

}  // namespace switchyard::testing
