// SPDX-License-Identifier: Apache-2.0
// A routing at one rank. Its experts run on a GPU either from the tokens or from the rows that a
// dispatch makes of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "support/device/device_experts.h"
#include "support/device/experts_problem.h"
#include "support/random.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/experts.h"

namespace switchyard::testing {

struct TokenSetup {
  ExpertsOptions options;
  Random::Picks picks = {.num_tokens = 300, .top_k = 3, .num_experts = 7, .none = 0.1};
  std::int64_t alignment = 1;
  std::int64_t capacity = 1600;         // rows; assignments beyond it are dropped
  Storage storage = Storage::together;  // of the weights, and of everything used with tokens
  Biases biases = Biases::none;
};

struct TokenWay {
  bool from_tokens = false;
  InnerRows inner_rows = InnerRows::kept;
  bool has_weights = true;
  GradientMode mode = GradientMode::overwrite;
  Dtype up_and_down = Dtype::bf16;  // gradient dtype
  Dtype gate = Dtype::bf16;
};

class TokenProblem {
 public:
  TokenProblem(const Device& device, const TokenSetup& setup);

  const Experts& experts() const { return experts_; }
  const std::vector<ExpertWeights>& weights() const { return weights_; }
  // Returns the number of assignments that did not fit.
  std::int64_t num_dropped() const;

  // Runs forward and backward. d_row_weights is [T, K] either way.
  ExpertsResults run(const TokenWay& way) const;

 private:
  std::int64_t num_tokens() const { return setup_.picks.num_tokens; }
  std::int64_t num_rows() const { return plan_.row_capacity(); }
  TensorView row_sources() const;
  std::vector<ExpertGradients> gradients_before(const TokenWay& way) const;
  Tensor of_assignments(const Tensor& d_row_weights) const;

  Device device_;
  TokenSetup setup_;
  Random random_{1};
  std::unique_ptr<Communicator> comm_;
  Dispatcher dispatcher_;
  Experts experts_;
  Tensor expert_ids_;  // on the host, like slots_
  Plan plan_;
  Tensor slots_;
  std::vector<ExpertWeights> weights_;
  TokenRows tokens_;
  TensorView d_y_, rows_, row_weights_;
  Tensor token_weights_, d_out_;
};

}  // namespace switchyard::testing
