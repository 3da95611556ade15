// SPDX-License-Identifier: Apache-2.0
#include "soak/soak_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "soak/plain_layer.h"

namespace switchyard::cli {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

double value_at(const ConstTensorView& view, std::int64_t row, std::int64_t column) {
  const ConstTensorView values = view.slice(row, row + 1);
  const auto c = static_cast<std::size_t>(column);
  switch (view.dtype()) {
    case Dtype::bf16:
      return to_float(values.span<Bfloat16>()[c]);
    case Dtype::i32:
      return values.span<std::int32_t>()[c];
    default:
      return values.span<float>()[c];
  }
}

void require_same(const std::string& name, const ConstTensorView& ours,
                  const ConstTensorView& expected) {
  if (ours.shape() != expected.shape()) {
    fail(fmt::format("{} is {}, but must be {}", name, ours.shape().to_string(),
                     expected.shape().to_string()));
  }
  const auto width = size_of(ours.dtype());
  for (std::int64_t r = 0; r < ours.rows(); ++r) {
    if (std::memcmp(ours.row(r), expected.row(r), static_cast<std::size_t>(ours.row_bytes())) ==
        0) {
      continue;
    }
    std::int64_t c = 0;
    while (std::memcmp(ours.row(r) + c * width, expected.row(r) + c * width,
                       static_cast<std::size_t>(width)) == 0) {
      ++c;
    }
    fail(fmt::format("{}[{},{}] is {}, but one rank alone has {}", name, r, c, value_at(ours, r, c),
                     value_at(expected, r, c)));
  }
}

template <typename View, typename Fn>
void for_each_tensor(const BasicExpertTensors<View>& expert, const std::string& prefix,
                     const Fn& fn) {
  const auto call = [&](const char* name, const View& view) {
    if (view.data() != nullptr) fn(prefix + name, view);
  };
  call("gate", expert.gate);
  call("up", expert.up);
  call("down", expert.down);
  call("gate_bias", expert.gate_bias);
  call("up_bias", expert.up_bias);
  call("down_bias", expert.down_bias);
}

// Visits the router and the shared expert, whose gradients cover only each rank's own tokens.
template <typename View, typename Fn>
void for_each_replicated(const BasicMoeTensors<View>& views, const Fn& fn) {
  if (views.router.gate.data() != nullptr) fn("d.router.gate", views.router.gate);
  if (views.router.gate_bias.data() != nullptr) fn("d.router.gate_bias", views.router.gate_bias);
  for_each_tensor(views.shared, "d.shared.", fn);
}

// List the tensors of an expert, or those that every rank has.
std::vector<ConstTensorView> tensors_of(const ExpertWeights& expert) {
  std::vector<ConstTensorView> tensors;
  for_each_tensor(expert, "", [&](const auto&, const auto& view) { tensors.push_back(view); });
  return tensors;
}
std::vector<ConstTensorView> replicated_of(const MoeWeights& weights) {
  std::vector<ConstTensorView> tensors;
  for_each_replicated(weights, [&](const auto&, const auto& view) { tensors.push_back(view); });
  return tensors;
}

double norm_of(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

double tolerance_of(Dtype dtype) { return dtype == Dtype::bf16 ? 5e-2 : 1e-4; }

bool has_kinks(Activation activation) {
  switch (activation) {
    case Activation::clamped_swiglu:
    case Activation::limited_swiglu:
    case Activation::reglu:
    case Activation::relu:
      return true;
    default:
      return false;
  }
}

// At a kink the gradient jumps, and rounding decides which side of it a value is on. In bf16 this
// affects a handful of values per step, so only gross errors can be detected.
double slope_tolerance(const MoeLayerOptions& o) {
  const bool jumps =
      has_kinks(o.activation) || (o.shared_intermediate > 0 && has_kinks(o.shared_activation));
  if (!jumps) return tolerance_of(o.dtype);
  return o.dtype == Dtype::bf16 ? 1.0 : 5e-2;
}

void require_near(const std::string& name, const Doubles& ours, const Doubles& expected,
                  double tolerance, double noise) {
  std::vector<double> difference = ours.values;
  for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= expected.values[i];
  const double error = norm_of(difference);
  const double bound = tolerance * norm_of(expected.values) + noise;
  if (!(error <= bound)) {
    fail(
        fmt::format("{} differs by {:.3g} from the oracle's, which has norm {:.3g}; rounding "
                    "explains at most {:.3g}",
                    name, error, norm_of(expected.values), bound));
  }
}

// Compares the slope of the loss along a random direction, computed by finite differences, with the
// gradient times that direction.
class Slopes {
 public:
  Slopes(PlainStep& step, std::uint64_t seed, double tolerance, double noise)
      : step_(step), draw_(seed), tolerance_(tolerance), noise_(noise) {}

  // gradients[i] is the gradient of values[i].
  void require_slope(const std::string& name, const std::vector<Doubles*>& values,
                     const std::vector<const Doubles*>& gradients) {
    std::vector<double> direction;
    double slope = 0.0;
    double norm = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      for (const double gradient : gradients[i]->values) {
        direction.push_back(draw_.signed_unit());
        slope += gradient * direction.back();
        norm += gradient * gradient;
      }
    }
    if (direction.empty()) return;
    const double expected =
        (loss_along(values, direction, kStep) - loss_along(values, direction, -kStep)) /
        (2.0 * kStep);
    const double bound = tolerance_ * std::sqrt(norm) + noise_;
    if (!(std::abs(slope - expected) <= bound)) {
      fail(
          fmt::format("{} gives the loss a slope of {:.6g}, but the oracle's is {:.6g}; rounding "
                      "explains a difference of at most {:.3g}",
                      name, slope, expected, bound));
    }
  }

 private:
  static constexpr double kStep = 1e-6;

  double loss_along(const std::vector<Doubles*>& values, const std::vector<double>& direction,
                    double length) {
    std::vector<std::vector<double>> before;
    auto next = direction.begin();
    for (Doubles* tensor : values) {
      before.push_back(tensor->values);
      for (double& v : tensor->values) v += length * *next++;
    }
    const double loss = compute(step_).loss;
    for (std::size_t i = 0; i < values.size(); ++i) values[i]->values = before[i];
    return loss;
  }

  PlainStep& step_;
  Draw draw_;
  double tolerance_;
  double noise_;
};

PlainStep plain_step(const SoakLayer& layer, const MoeWeights& weights, const SoakInput& whole,
                     const SoakResult& result) {
  PlainStep step{.options = layer.options,
                 .x = doubles_of(whole.x),
                 .d_y = doubles_of(whole.d_y),
                 .weights = doubles_of(weights),
                 .d_losses = layer.d_losses};
  const auto ids = result.ids.span<std::int32_t>();
  step.ids.assign(ids.begin(), ids.end());
  for (const auto slot : result.slots.span<std::int32_t>()) step.is_kept.push_back(slot >= 0);
  step.is_valid.assign(static_cast<std::size_t>(whole.x.rows()), true);
  if (whole.weights) step.given_weights = doubles_of(*whole.weights);
  step.added_weights = {.columns = layer.options.router.top_k,
                        .values = std::vector<double>(step.ids.size())};
  if (!whole.valid) return step;
  const auto valid = whole.valid->span<std::int32_t>();
  for (std::size_t t = 0; t < valid.size(); ++t) step.is_valid[t] = valid[t] != 0;
  // The layer ignores d_y of padding, so the loss must ignore it too.
  for (std::int64_t t = 0; t < whole.x.rows(); ++t) {
    if (!step.is_valid[static_cast<std::size_t>(t)]) {
      std::fill_n(step.d_y.row(t), step.d_y.columns, 0.0);
    }
  }
  return step;
}

void require_losses(const RouterLosses& ours, const PlainResult& expected, double tolerance) {
  const auto is_near = [&](double a, double b) {
    return std::abs(a - b) <= tolerance * (std::abs(b) + 1e-3);
  };
  if (!is_near(ours.balance, expected.balance) || !is_near(ours.z, expected.z)) {
    fail(fmt::format("the losses are {:.6g} and {:.6g}, but the oracle's {:.6g} and {:.6g}",
                     ours.balance, ours.z, expected.balance, expected.z));
  }
}

std::vector<const Doubles*> constant(const std::vector<Doubles*>& tensors) {
  return {tensors.begin(), tensors.end()};
}

// Drops the tensors that either side lacks.
void keep_common(std::vector<Doubles*>& values, std::vector<const Doubles*>& gradients) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i]->is_given() || !gradients[i]->is_given()) continue;
    values[kept] = values[i];
    gradients[kept++] = gradients[i];
  }
  values.resize(kept);
  gradients.resize(kept);
}

std::int64_t needed_rows(const std::vector<std::int64_t>& picks, std::span<const std::int32_t> mine,
                         std::int64_t alignment) {
  std::int64_t rows = 0;
  for (const auto e : mine) {
    rows += (picks[static_cast<std::size_t>(e)] + alignment - 1) / alignment * alignment;
  }
  return rows;
}

}  // namespace

void require_bits_of_one_rank(const SoakResult& part, const SoakResult& one,
                              const ExpertPlacement& placement, int rank, std::int64_t first) {
  const auto last = first + part.y.rows();
  require_same("the routing", part.ids, one.ids.view().slice(first, last));
  require_same("y", part.y, one.y.view().slice(first, last));
  require_same("d_x", part.d_x, one.d_x.view().slice(first, last));
  require_same("d_weights", part.d_weights, one.d_weights.view().slice(first, last));
  if (part.losses.balance != one.losses.balance || part.losses.z != one.losses.z) {
    fail(fmt::format("the losses are {} and {}, but one rank alone has {} and {}",
                     part.losses.balance, part.losses.z, one.losses.balance, one.losses.z));
  }
  const auto mine = placement.experts_of(rank);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto expected =
        tensors_of(one.gradients->weights().experts[static_cast<std::size_t>(mine[i])]);
    auto next = expected.begin();
    for_each_tensor(part.gradients->weights().experts[i], fmt::format("d.expert {}.", mine[i]),
                    [&](const auto& name, const auto& view) { require_same(name, view, *next++); });
  }
}

void require_plain(const SoakCase& c, std::size_t l, const SoakInput& whole,
                   const SoakResult& result) {
  const SoakLayer& layer = c.layers[l];
  const MoeParameters weights = whole_weights(c, l);
  PlainStep step = plain_step(layer, weights.weights(), whole, result);
  const double tolerance = tolerance_of(layer.options.dtype);
  const double noise = 1e-2 * tolerance * (1.0 + norm_of(step.d_y.values));
  if (layer.source == PickSource::router) {
    if (const double short_of = worst_choice(step); short_of > 1e-5) {
      fail(fmt::format("a pick scores {:.3g} less than one that was left out", short_of));
    }
  }
  const PlainResult expected = compute(step);
  require_near("y", doubles_of(result.y), expected.y, tolerance, noise);
  require_losses(result.losses, expected, tolerance);

  Slopes slopes(step, c.seed_for("directions", 0, l), slope_tolerance(layer.options), noise);
  const Doubles d_x = doubles_of(result.d_x);
  slopes.require_slope("d_x", {&step.x}, {&d_x});
  const Doubles d_weights = doubles_of(result.d_weights);
  slopes.require_slope("d_weights", {&step.added_weights}, {&d_weights});
  PlainWeights gradients = doubles_of(result.gradients->weights());
  if (layer.source == PickSource::given_weights) gradients.router = {};  // backward skips these
  auto values = tensors_of(step.weights);
  auto given = constant(tensors_of(gradients));
  keep_common(values, given);
  slopes.require_slope("the parameters' gradient", values, given);
}

void require_status(const SoakResult& result, const SoakLayer& layer, Room room,
                    const ExpertPlacement& placement, const Tensor& ids) {
  if (room == Room::exact || room == Room::replay || layer.options.capacity.factor > 0.0) return;
  std::vector<std::int64_t> picks(static_cast<std::size_t>(placement.num_experts()));
  for (const auto id : ids.span<std::int32_t>()) {
    if (id >= 0) ++picks[static_cast<std::size_t>(id)];
  }
  bool overflows = false;
  for (int r = 0; r < placement.num_ranks(); ++r) {
    const auto needed = needed_rows(picks, placement.experts_of(r), layer.options.alignment);
    overflows = overflows || needed > layer.capacity;
    const auto said = result.status.needed_rows.at(static_cast<std::size_t>(r));
    if (said != needed) {
      fail(fmt::format("the plan says that rank {} needs {} rows, but it needs {}", r, said,
                       needed));
    }
  }
  if (result.status.overflow != overflows) {
    fail(fmt::format("the plan says {}, but there is {}",
                     result.status.overflow ? "overflow" : "no overflow",
                     overflows ? "one" : "none"));
  }
  if (result.is_refused != (overflows && room != Room::drop)) {
    fail(result.is_refused ? "check() rejects a correct step"
                           : "check() accepts a step that overflowed");
  }
}

SoakResult assemble(Communicator& comm, const SoakCase& c, std::size_t l,
                    const ExpertPlacement& placement, const SoakResult& part, std::int64_t first,
                    std::int64_t num_tokens) {
  const SoakLayer& layer = c.layers[l];
  const auto whole_of = [&](const Tensor& mine) {
    Tensor whole = Tensor::zeros(mine.shape().with_rows(num_tokens), mine.dtype());
    std::memcpy(whole.view().slice(first, first + mine.rows()).data(), mine.data(),
                static_cast<std::size_t>(mine.bytes()));
    comm.all_reduce(whole);
    return whole;
  };
  SoakResult whole{.y = whole_of(part.y),
                   .d_x = whole_of(part.d_x),
                   .d_weights = whole_of(part.d_weights),
                   .ids = whole_of(part.ids),
                   .slots = whole_of(part.slots),
                   .losses = part.losses,
                   .status = part.status};
  whole.gradients.emplace(layer.options, layer.placement(1), 0, layer.biases);
  const MoeWeights& ours = part.gradients->weights();
  const MoeViews& all = whole.gradients->views();
  const auto replicated = replicated_of(ours);
  auto next = replicated.begin();
  for_each_replicated(all, [&](const auto&, const auto& to) { Device().copy(*next++, to); });
  const auto mine = placement.experts_of(comm.rank());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto tensors = tensors_of(ours.experts[i]);
    next = tensors.begin();
    for_each_tensor(all.experts[static_cast<std::size_t>(mine[i])], "",
                    [&](const auto&, const auto& to) { Device().copy(*next++, to); });
  }
  const auto sum = [&](const auto&, const TensorView& view) { comm.all_reduce(view); };
  for_each_replicated(all, sum);
  for (const auto& expert : all.experts) for_each_tensor(expert, "", sum);
  return whole;
}

void require_near_sum(Communicator& comm, const SoakResult& part, const SoakResult& one) {
  const double noise = 1e-2 * norm_of(doubles_of(one.d_x).values) + 1e-3;
  const auto expected = replicated_of(one.gradients->weights());
  auto next = expected.begin();
  for_each_replicated(part.gradients->weights(), [&](const auto& name, const auto& view) {
    Tensor sum(view.shape(), view.dtype());
    Device().copy(view, sum);
    comm.all_reduce(sum);
    const double tolerance = tolerance_of(view.dtype());
    require_near(name, doubles_of(sum), doubles_of(*next++), tolerance, tolerance * noise);
  });
}

}  // namespace switchyard::cli
