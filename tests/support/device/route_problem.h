// SPDX-License-Identifier: Apache-2.0
// Routes random tokens on a device, and computes the expected results in double precision.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "device/device_backend.h"
#include "support/reference/moe_reference.h"

namespace switchyard::testing {

struct RouteCase {
  std::string name;
  RouterOptions options;
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  Dtype x = Dtype::f32;
  Dtype gate = Dtype::f32;
  bool gate_bias = false;
  std::int64_t gap = 0;  // elements between the rows of every matrix
};
// Covers every option, dtype and code path: few and many experts, sizes that fit no tile.
std::vector<RouteCase> route_cases();

// Returns a view of the first columns of wider rows.
TensorView first_columns(Tensor& rows, std::int64_t columns);

// Sets an element of an f32 or bf16 matrix in host memory.
void set_element(const TensorView& matrix, std::int64_t row, std::int64_t column, float value);

// Inputs in host memory.
struct RouteInputs {
  explicit RouteInputs(const RouteCase& route_case);

  RouteCase test;
  Tensor x;                             // [T, H + gap]
  Tensor gate;                          // [E, H + gap]
  std::optional<Tensor> gate_bias;      // [E]
  std::optional<Tensor> score_bias;     // [E]
  std::optional<Tensor> valid;          // [T]
  std::optional<Tensor> expert_ids;     // [T, K]: a choice to replay
  std::optional<Tensor> given_weights;  // weights of the replay: the first K columns of [T, K + 3]
  BadIds bad_ids = BadIds::stay;

  ConstTensorView x_view() { return first_columns(x, test.hidden); }
  ReferenceRouter reference_router();
  Doubles reference_x() { return doubles_of(x_view()); }
  Doubles reference_scores();  // [T, E]
  // Makes tokens 0, 3, 6, … padding that holds NaN.
  void pad_every_third();
};

// Returns the logsumexp of one token's logits, without the score bias.
double reference_log_sum_exp(const ReferenceRouter& router, const Doubles& x, std::int64_t token);

// Results of route_tokens on a device, copied back to the host. Outputs are poisoned beforehand.
struct RouteResult {
  Tensor expert_ids;  // [T, K]
  Tensor weights;     // [T, K]
  Tensor problems;    // [kProblemWords]
};
RouteResult route_on(const Device& device, RouteInputs& inputs, RouterSums* sums = nullptr);

struct RouteSlopes {
  LossScores scores = LossScores::as_routed;
  std::int64_t sequence_tokens = 1;
  std::optional<Tensor> by_score = {};   // [S, E]
  std::optional<Tensor> by_square = {};  // [1]
};
struct RouteGradients {
  Tensor d_x;                       // [T, H]; before backward its rows may be wider
  Tensor gate;                      // [E, H]
  std::optional<Tensor> bias = {};  // [E]
};
struct RouteBackwardInputs {
  const Tensor& expert_ids;
  const Tensor& d_weights;
  const RouteSlopes* slopes = nullptr;
  GradientMode mode = GradientMode::overwrite;
};
// `start` holds the initial contents of the gradients.
RouteGradients backward_on(const Device& device, RouteInputs& inputs,
                           const RouteBackwardInputs& backward, const RouteGradients& start);
// Returns what is added to d_x, and the gradients, in f32. Tokens marked in `without_part`
// contribute nothing.
RouteGradients reference_backward(RouteInputs& inputs, const RouteBackwardInputs& backward,
                                  const std::vector<bool>& without_part);

}  // namespace switchyard::testing
