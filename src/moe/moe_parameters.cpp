#include "switchyard/moe_parameters.h"

#include <cmath>
#include <cstring>

#include "core/require.h"
#include "moe/check_tensors.h"
#include "moe/expert_tensors.h"
#include "switchyard/moe_layer.h"

namespace switchyard {
namespace {

// The same numbers on every machine: SplitMix64.
class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t stream) : state_(mixed(mixed(seed) + stream)) {}

  // −1 … 1
  float next() {
    state_ += 0x9e3779b97f4a7c15U;
    return static_cast<float>(mixed(state_) >> 40) * 0x1p-23F - 1.0F;
  }

 private:
  static std::uint64_t mixed(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

void fill(const TensorView& view, Draws& draws, std::int64_t fan_in) {
  if (!is_given(view)) return;
  const float bound = 1.0F / std::sqrt(static_cast<float>(fan_in));
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    const auto row = view.slice(r, r + 1);
    if (view.dtype() == Dtype::f32) {
      for (float& v : row.span<float>()) v = bound * draws.next();
    } else {
      for (Bfloat16& v : row.span<Bfloat16>()) v = to_bfloat16(bound * draws.next());
    }
  }
}

void fill(const ExpertGradients& expert, std::uint64_t seed, std::uint64_t id) {
  Draws draws(seed, id + 1);
  fill(expert.gate, draws, expert.up.shape()[1]);
  fill(expert.up, draws, expert.up.shape()[1]);
  fill(expert.down, draws, expert.down.shape()[1]);
  fill(expert.gate_bias, draws, expert.up.shape()[1]);
  fill(expert.up_bias, draws, expert.up.shape()[1]);
  fill(expert.down_bias, draws, expert.down.shape()[1]);
}

TensorView zeros(const Shape& shape, Dtype dtype) { return Tensor::zeros(shape, dtype); }

std::vector<ExpertGradients> make_experts(const ExpertsOptions& options, std::int64_t count,
                                          Biases biases) {
  if (count == 0) return {};
  const auto width = options.hidden_width();
  PackedExpertGradients packed{
      .gate_up = zeros({count, width, options.hidden}, options.dtype),
      .down = zeros({count, options.hidden, options.intermediate}, options.dtype)};
  if (biases == Biases::all) {
    packed.gate_up_bias = zeros({count, width}, options.dtype);
    packed.down_bias = zeros({count, options.hidden}, options.dtype);
  }
  return unpack(packed, options.activation);
}

ExpertWeights as_weights(const ExpertGradients& e) {
  ExpertWeights weights;
  const auto from = tensors_of(e);
  const auto to = tensors_in(weights);
  for (std::size_t t = 0; t < kNumExpertTensors; ++t) *to[t] = from[t];
  return weights;
}

void set_zero(const TensorView& view) {
  for (std::int64_t r = 0; is_given(view) && r < view.rows(); ++r) {
    std::memset(view.row(r), 0, static_cast<std::size_t>(view.row_bytes()));
  }
}

void set_zero(const ExpertGradients& e) {
  for (const auto& view : tensors_of(e)) set_zero(view);
}

}  // namespace

MoeParameters::MoeParameters(const MoeLayerOptions& options, const ExpertPlacement& placement,
                             int rank, Biases biases) {
  require(options.hidden > 0 && options.intermediate > 0,
          "hidden ({}) and intermediate ({}) must be positive", options.hidden,
          options.intermediate);
  require(0 <= rank && rank < placement.num_ranks(), "rank ({}) must be 0 to {}", rank,
          placement.num_ranks() - 1);
  const auto experts = std::int64_t{placement.num_experts()};
  tensors_.router.gate = zeros({experts, options.hidden}, options.dtype);
  if (biases == Biases::all) tensors_.router.gate_bias = zeros({experts}, options.dtype);
  if (options.router.score_bias != ScoreBias::none) {
    tensors_.router.score_bias = zeros({experts}, Dtype::f32);
  }
  const auto local = static_cast<std::int64_t>(placement.experts_of(rank).size());
  tensors_.experts = make_experts(options.experts(), local, biases);
  if (options.shared_intermediate > 0) {
    tensors_.shared = make_experts(options.shared_expert(), 1, Biases::none).front();
  }
}

MoeParameters MoeParameters::random(const MoeLayerOptions& options,
                                    const ExpertPlacement& placement, int rank, std::uint64_t seed,
                                    Biases biases) {
  MoeParameters result(options, placement, rank, biases);
  Draws draws(seed, 0);
  fill(result.tensors_.router.gate, draws, options.hidden);
  fill(result.tensors_.router.gate_bias, draws, options.hidden);
  const auto ids = placement.experts_of(rank);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    fill(result.tensors_.experts[i], seed, static_cast<std::uint64_t>(ids[i]));
  }
  if (options.shared_intermediate > 0) {
    fill(result.tensors_.shared, seed, static_cast<std::uint64_t>(placement.num_experts()));
  }
  return result;
}

MoeWeights MoeParameters::weights() const {
  MoeWeights weights{
      .router = {tensors_.router.gate, tensors_.router.gate_bias, tensors_.router.score_bias},
      .shared = as_weights(tensors_.shared)};
  for (const auto& expert : tensors_.experts) weights.experts.push_back(as_weights(expert));
  return weights;
}

void MoeParameters::set_zero() {
  switchyard::set_zero(tensors_.router.gate);
  switchyard::set_zero(tensors_.router.gate_bias);
  switchyard::set_zero(tensors_.router.score_bias);
  for (const auto& expert : tensors_.experts) switchyard::set_zero(expert);
  switchyard::set_zero(tensors_.shared);
}

}  // namespace switchyard
