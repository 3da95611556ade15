// SPDX-License-Identifier: Apache-2.0
#include "verify/golden_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "between_ranks.h"
#include "switchyard/load_balancer.h"

namespace switchyard::cli {
namespace {

Tensor as_floats(std::span<const std::int64_t> values) {
  Tensor result({static_cast<std::int64_t>(values.size())}, Dtype::f32);
  std::transform(values.begin(), values.end(), result.span<float>().begin(),
                 [](std::int64_t v) { return static_cast<float>(v); });
  return result;
}

Tensor as_tensor(float value) { return Tensor::from<float>({1}, {value}); }

void compare_routing(const SavedForBackward& saved, const Device& device, const GoldenCase& golden,
                     const RankCase& recorded, Differences& out) {
  const Routing& routing = saved.routing();
  if (recorded.expert_ids) {
    out.add_ids("expert_ids", device.to_host(routing.expert_ids), *recorded.expert_ids);
  }
  if (recorded.routing_weights) {
    out.add("routing_weights", device.to_host(routing.weights), *recorded.routing_weights);
  }
  if (!recorded.aux_loss) return;
  out.add("aux_loss", {}, {});
  out.add("z_loss", {}, {});
  if (recorded.x.rows() == 0) return;  // the recorded losses were divided by zero
  out.add("aux_loss", as_tensor(golden.aux_weight() * saved.losses().balance), *recorded.aux_loss);
  out.add("z_loss", as_tensor(saved.losses().z), *recorded.z_loss);
}

// Compares the statistics that training leaves behind, for each rank separately, as in
// KempnerForge.
void compare_statistics(const MoeLayer& layer, const RankCase& recorded, Differences& out) {
  const auto& picks = layer.pick_counts().picks;
  if (recorded.expert_counts) out.add("expert_counts", as_floats(picks), *recorded.expert_counts);
  if (!recorded.expert_bias_after) return;
  LoadBalancer balancer(static_cast<int>(picks.size()), {.rule = BiasRule::moving_average});
  Tensor bias = Tensor::zeros({static_cast<std::int64_t>(picks.size())}, Dtype::f32);
  balancer.update(picks, 0, bias);
  out.add("expert_bias_after", bias, *recorded.expert_bias_after, Rule::near_small);
  out.add("expert_ema_after", balancer.moving_average(), *recorded.expert_ema_after);
}

void compare_experts(const GoldenCase& golden, const MoeGradients& ours, const MoeWeights& recorded,
                     Differences& out) {
  const auto name = [](std::string_view tensor) { return fmt::format("d.{}", tensor); };
  const WeightNames& names = golden.weight_names();
  if (has_gate(golden.options().activation)) out.add(name(names.gate), {}, {});
  out.add(name(names.up), {}, {});
  out.add(name(names.down), {}, {});
  for (std::size_t i = 0; i < ours.experts.size(); ++i) {
    if (has_gate(golden.options().activation)) {
      out.add(name(names.gate), ours.experts[i].gate, recorded.experts[i].gate);
    }
    out.add(name(names.up), ours.experts[i].up, recorded.experts[i].up);
    out.add(name(names.down), ours.experts[i].down, recorded.experts[i].down);
  }
}

// A score bias added to the logits has the same gradient as a gate bias: the sum of the logits'
// gradients over tokens. The layer is given a gate bias of zeros to obtain that gradient.
bool learns_score_bias(const GoldenCase& golden) {
  return golden.options().router.score_bias == ScoreBias::logits;
}

// Compares the gradients that every rank has over its own tokens. They are recorded by rank, or as
// their sum, which rank 0 compares.
void compare_replicated(Communicator& comm, const GoldenCase& golden, const MoeGradients& ours,
                        const MoeWeights& recorded, Differences& out) {
  const bool by_rank = golden.num_ranks() > 0;
  const auto add = [&](const std::string& tensor, const TensorView& view,
                       const ConstTensorView& expected, Rule rule) {
    if (!by_rank) comm.all_reduce(view);
    if (by_rank || comm.rank() == 0) return out.add(tensor, view, expected, rule);
    out.add(tensor, {}, {}, rule);
  };
  const WeightNames& names = golden.weight_names();
  add(fmt::format("d.{}", names.router), ours.router.gate, recorded.router.gate,
      Rule::near_or_noise);
  if (learns_score_bias(golden)) {
    add(fmt::format("d.{}", names.score_bias), ours.router.gate_bias, recorded.router.score_bias,
        Rule::near_or_noise);
  }
  if (golden.options().shared_intermediate == 0) return;
  const auto shared = [&](const char* name) { return fmt::format("d.{}{}", names.shared, name); };
  add(shared("gate_proj.weight"), ours.shared.gate, recorded.shared.gate, Rule::near);
  add(shared("up_proj.weight"), ours.shared.up, recorded.shared.up, Rule::near);
  add(shared("down_proj.weight"), ours.shared.down, recorded.shared.down, Rule::near);
}

std::vector<Difference> run_rank(Communicator& comm, const GoldenCase& golden,
                                 const Division& division, const Device& device) {
  const auto recorded = golden.rank_case(division, comm.rank());
  MoeWeights weights = on_device(device, recorded.weights);
  MoeParameters parameters(golden.options(), division.placement, comm.rank(), Biases::none, device);
  MoeGradients gradients = parameters.views();
  if (learns_score_bias(golden)) {
    const Tensor none = Tensor::zeros({golden.options().router.num_experts}, Dtype::f32);
    weights.router.gate_bias = device.copy_of(none).view();
    gradients.router.gate_bias = device.empty(none.shape(), Dtype::f32);
  }
  const Tensor x = device.copy_of(recorded.x);
  const Tensor d_y = device.copy_of(recorded.dy);
  MoeLayer layer(comm, division.placement, golden.options(), device);
  SavedForBackward saved;
  Differences differences;
  const Tensor y = layer.forward(weights, {.x = x}, saved);
  compare_routing(saved, device, golden, recorded, differences);
  differences.add("y", device.to_host(y), recorded.y);

  Tensor d_x = device.empty(x.shape(), Dtype::f32);
  layer.backward(weights, saved, d_y, {.d_x = d_x, .gradients = gradients});
  differences.add("dx", device.to_host(d_x), recorded.dx);
  compare_statistics(layer, recorded, differences);
  const MoeGradients ours = MoeParameters::of(gradients, device).copy_on(Device()).views();
  compare_experts(golden, ours, recorded.gradients, differences);
  compare_replicated(comm, golden, ours, recorded.gradients, differences);
  return differences.all();
}

RankDifferences gather(Communicator& comm, const std::vector<Difference>& mine) {
  std::vector<double> numbers;
  for (const Difference& d : mine) {
    numbers.push_back(d.error_squared);
    numbers.push_back(d.recorded_squared);
  }
  const auto all = gather_numbers(comm, numbers);
  RankDifferences result(static_cast<std::size_t>(comm.size()), mine);
  auto number = all.begin();
  for (auto& differences : result) {
    for (Difference& d : differences) {
      d.error_squared = *number++;
      d.recorded_squared = *number++;
    }
  }
  return result;
}

}  // namespace

bool GoldenRun::ok() const {
  return error.empty() && std::all_of(comparisons.begin(), comparisons.end(),
                                      [](const Comparison& c) { return c.ok(); });
}

GoldenRun run_golden_case(Communicator& comm, const GoldenCase& golden, const Division& division,
                          const DeviceChoice& device) {
  std::vector<Difference> mine;
  const auto error = try_on_ranks(comm, [&](Communicator& ranks) {
    mine = run_rank(ranks, golden, division, device.make(ranks.rank()));
  });
  if (!error.empty()) return {.error = error};
  const auto by_rank = gather(comm, mine);
  if (golden.num_ranks() > 0) return {.comparisons = judge_worst(by_rank)};
  return {.comparisons = judge_sum(by_rank)};
}

}  // namespace switchyard::cli
