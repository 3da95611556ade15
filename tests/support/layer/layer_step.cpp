// SPDX-License-Identifier: Apache-2.0
#include "support/layer/layer_step.h"

#include "support/compare.h"
#include "support/random.h"

namespace switchyard::testing {
namespace {

bool same_expert(const ExpertGradients& a, const ExpertGradients& b) {
  return same_bits(copy_of(a.gate), copy_of(b.gate)) && same_bits(copy_of(a.up), copy_of(b.up)) &&
         same_bits(copy_of(a.down), copy_of(b.down)) && same_bits(a.up_bias, b.up_bias) &&
         same_bits(a.gate_bias, b.gate_bias) && same_bits(a.down_bias, b.down_bias);
}

}  // namespace

LayerProblem::LayerProblem(const MoeLayerOptions& layer_options) : options(layer_options) {
  Random random(23);
  x = random.tensor({num_tokens, options.hidden}, options.dtype);
  d_y = random.tensor({num_tokens, options.hidden}, options.dtype);
  ids = random.expert_ids({num_tokens, options.router.top_k, options.router.num_experts, 0.5});
}

StepInput input_of(const LayerProblem& problem, const Piece& piece) {
  StepInput in{copy_of(piece.of(problem.x)), copy_of(piece.of(problem.d_y)),
               copy_of(piece.of(problem.ids))};
  if (problem.weights) in.weights = copy_of(piece.of(*problem.weights));
  if (problem.valid) in.valid = copy_of(piece.of(*problem.valid));
  return in;
}

LayerResults run_step(MoeLayer& layer, const MoeWeights& weights, const StepInput& in,
                      Biases biases, const Device& device) {
  const int rank = layer.communicator().rank();
  MoeParameters on_device(layer.options(), layer.placement(), rank, biases, device);
  const Tensor x = device.copy_of(in.x);
  const Tensor ids = device.copy_of(in.ids);
  const Tensor d_y = device.copy_of(in.d_y);
  LayerInput given{.x = x, .expert_ids = ids};
  if (in.weights) given.expert_weights = device.copy_of(*in.weights).view();
  if (in.valid) given.valid = device.copy_of(*in.valid).view();
  SavedForBackward saved;
  LayerResults results;
  results.y = device.to_host(layer.forward(weights, given, saved));
  Tensor d_x = device.empty(in.x.shape(), in.x.dtype());
  Tensor d_weights = device.empty(in.ids.shape(), Dtype::f32);
  layer.backward(weights, saved, d_y,
                 {.d_x = d_x, .gradients = on_device.views(), .d_weights = d_weights});
  results.d_x = device.to_host(d_x);
  results.d_weights = device.to_host(d_weights);
  MoeParameters gradients = on_device.copy_on(Device());
  const auto mine = layer.placement().experts_of(rank);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    results.experts[mine[i]] = gradients.views().experts[i];
  }
  return results;
}

bool same_part(const LayerResults& part, const Piece& piece, const LayerResults& whole) {
  bool equal = same_bits(part.y, piece.of(whole.y)) && same_bits(part.d_x, piece.of(whole.d_x)) &&
               same_bits(part.d_weights, piece.of(whole.d_weights));
  for (const auto& [expert, gradients] : part.experts) {
    equal = equal && same_expert(gradients, whole.experts.at(expert));
  }
  return equal;
}

}  // namespace switchyard::testing
