// SPDX-License-Identifier: Apache-2.0
#include "support/layer/layer_cases.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/reference/reference_losses.h"

namespace switchyard::testing {
namespace {

// Computes ⟨y, d_y⟩ plus the weighted losses in double precision, as a function of x and the
// weights.
class Oracle {
 public:
  Oracle(const LayerCase& c, const CaseInput& in, const LayerOutcome& actual)
      : case_(c), weights_(doubles_of(in.weights)), x_(doubles_of(in.x)), d_y_(doubles_of(in.d_y)) {
    forget_padding(in);
    const auto& router = c.options.router;
    routing_ = reference_route(router, weights_.router, x_);
    if (in.ids) {
      const auto ids = in.ids->span<std::int32_t>();
      routing_.expert_ids.assign(ids.begin(), ids.end());
    }
    for (std::size_t i = 0; i < routing_.expert_ids.size(); ++i) {
      if (!counts(i / static_cast<std::size_t>(router.top_k))) routing_.expert_ids[i] = -1;
    }
    picks_ = routing_.expert_ids;
    scale_.assign(static_cast<std::size_t>(router.num_experts), 1.0);
    if (c.options.gradient_scale != GradientScale::off) find_scales();
    const auto slots = actual.slots.span<std::int32_t>();
    for (std::size_t i = 0; i < slots.size(); ++i) {  // dropped for capacity
      if (slots[i] < 0) routing_.expert_ids[i] = -1;
    }
    routing_.weights = routed_weights();
  }

  const std::vector<std::int32_t>& picks() const { return picks_; }
  Tensor y() const { return tensor_of(layer(routing_.weights)); }
  ReferenceLosses losses() const {
    const auto tokens = case_.options.losses.balance == BalanceLoss::sequence ? x_.rows() / 2 : 1;
    return reference_losses(case_.options.router, case_.options.losses, weights_.router, x_, picks_,
                            tokens);
  }
  NumericLayerGradients gradients() {
    const Loss fixed = [&] { return dot(layer(routing_.weights), d_y_); };
    const Loss whole = [&] {
      double loss = dot(layer(routed_weights()), d_y_);
      if (case_.d_losses.balance != 0.0F || case_.d_losses.z != 0.0F) {
        const auto now = losses();
        loss += case_.d_losses.balance * now.balance + case_.d_losses.z * now.z;
      }
      return loss;
    };
    NumericLayerGradients result;
    result.d_weights = numeric_gradient(routing_.weights, fixed);
    result.d_x = numeric_gradient(x_, whole);
    result.weights.router = numeric_gradient(weights_.router, whole);
    result.weights.shared = numeric_gradient(weights_.shared, fixed);
    for (auto& expert : weights_.experts) {
      result.weights.experts.push_back(numeric_gradient(expert, fixed));
    }
    return result;
  }

 private:
  bool counts(std::size_t token) const { return is_padding_.empty() || !is_padding_[token]; }

  void forget_padding(const CaseInput& in) {
    if (!in.valid) return;
    for (std::int64_t t = 0; t < x_.rows(); ++t) {
      is_padding_.push_back(in.valid->span<std::int32_t>()[static_cast<std::size_t>(t)] == 0);
      if (!is_padding_.back()) continue;
      std::fill_n(x_.row(t), x_.shape[1], 0.0);
      std::fill_n(d_y_.row(t), x_.shape[1], 0.0);
    }
  }

  // Scale of an expert at one rank: the mean number of picks per expert, divided by its own picks,
  // before any are dropped.
  void find_scales() {
    std::vector<double> counted(scale_.size(), 0.0);
    double all = 0.0;
    for (const auto id : picks_) {
      if (id < 0) continue;
      counted[static_cast<std::size_t>(id)] += 1.0;
      all += 1.0;
    }
    for (std::size_t e = 0; e < scale_.size(); ++e) {
      if (counted[e] > 0.0) scale_[e] = all / static_cast<double>(scale_.size()) / counted[e];
    }
  }

  Doubles routed_weights() const {
    return reference_replay(case_.options.router, weights_.router, x_, picks_);
  }

  Doubles layer(Doubles weights) const {
    for (std::size_t i = 0; i < picks_.size(); ++i) {
      if (picks_[i] >= 0) weights.values[i] *= scale_[static_cast<std::size_t>(picks_[i])];
    }
    Doubles y = reference_layer(case_.options, weights_, x_, {routing_.expert_ids, weights});
    for (std::int64_t t = 0; t < y.rows(); ++t) {
      if (!counts(static_cast<std::size_t>(t))) std::fill_n(y.row(t), y.shape[1], 0.0);
    }
    return y;
  }

  const LayerCase& case_;
  ReferenceWeights weights_;
  Doubles x_, d_y_;
  std::vector<bool> is_padding_;
  ReferenceRouting routing_;         // as planned
  std::vector<std::int32_t> picks_;  // before capacity drops any
  std::vector<double> scale_;
};

// Applies `copy` to every tensor that is given.
template <typename View, typename From, typename Copy>
BasicMoeTensors<View> mapped(const BasicMoeTensors<From>& from, Copy copy) {
  const auto one = [&](const From& view) -> View {
    return view.data() == nullptr ? View() : View(copy(view));
  };
  const auto expert = [&](const BasicExpertTensors<From>& e) -> BasicExpertTensors<View> {
    return {one(e.gate),      one(e.up),      one(e.down),
            one(e.gate_bias), one(e.up_bias), one(e.down_bias)};
  };
  BasicMoeTensors<View> to{
      .router = {one(from.router.gate), one(from.router.gate_bias), one(from.router.score_bias)},
      .shared = expert(from.shared)};
  for (const auto& e : from.experts) to.experts.push_back(expert(e));
  return to;
}

}  // namespace

CaseInput::CaseInput(const LayerCase& c) {
  const auto& o = c.options;
  Random random(5);
  weights = random_layer(random, o, c.biases);
  x = random.tensor({c.num_tokens, o.hidden}, o.dtype);
  d_y = random.tensor({c.num_tokens, o.hidden}, o.dtype);
  const auto top_k = o.router.top_k;
  if (c.ids) ids = Tensor::from<std::int32_t>({c.num_tokens, top_k}, c.ids(c.num_tokens, top_k));
  if (!c.has_padding) return;
  valid = Tensor({c.num_tokens}, Dtype::i32);
  for (std::int64_t t = 0; t < c.num_tokens; ++t) {
    const bool counts = t % 5 != 3;
    valid->span<std::int32_t>()[static_cast<std::size_t>(t)] = counts ? 7 : 0;
    for (const auto& tokens : {x.view(), d_y.view()}) {  // padding is never read
      if (!counts) poison(tokens.slice(t, t + 1));
    }
  }
}

LayerOutcome run_case(const LayerCase& c, const CaseInput& host, const Device& device) {
  const auto world = connect();
  const auto& o = c.options;
  MoeLayer layer(*world, ExpertPlacement::contiguous(o.router.num_experts, 1), o, device);
  const auto on_device = [&](const auto& view) { return device.copy_of(view); };
  const auto weights = mapped<ConstTensorView>(host.weights, on_device);
  const auto gradients = mapped<TensorView>(gradients_for(host.weights), on_device);
  const auto ruined = [&](const Shape& shape, Dtype dtype) {
    Tensor tensor(shape, dtype);
    poison(tensor);
    return device.copy_of(tensor);
  };
  const Tensor x = device.copy_of(host.x);
  const Tensor d_y = device.copy_of(host.d_y);
  LayerInput in{.x = x};
  if (host.ids) in.expert_ids = device.copy_of(*host.ids).view();
  if (host.valid) in.valid = device.copy_of(*host.valid).view();
  if (o.losses.balance == BalanceLoss::sequence) {
    in.sequence = SequenceShard(2, c.num_tokens / 2, 1, 0);
  }
  Tensor y = ruined(host.x.shape(), o.dtype);
  Tensor d_x = ruined(host.x.shape(), o.dtype);
  Tensor d_weights = ruined({c.num_tokens, o.router.top_k}, Dtype::f32);
  SavedForBackward saved;
  layer.forward(weights, in, y, &saved);
  layer.check();
  LayerOutcome results;
  results.y = device.to_host(y);
  results.expert_ids = device.to_host(saved.routing().expert_ids);
  results.slots = device.to_host(saved.plan().slots());
  results.losses = saved.losses();
  layer.backward(weights, saved, {.d_y = d_y, .d_losses = c.d_losses},
                 {.d_x = d_x, .gradients = gradients, .d_weights = d_weights});
  results.d_x = device.to_host(d_x);
  results.d_weights = device.to_host(d_weights);
  results.gradients =
      mapped<TensorView>(gradients, [&](const auto& view) { return device.to_host(view); });
  return results;
}

void expect_same_bits(const LayerOutcome& a, const LayerOutcome& b) {
  EXPECT_TRUE(same_bits(a.y, b.y));
  EXPECT_TRUE(same_bits(a.d_x, b.d_x));
  EXPECT_TRUE(same_bits(a.d_weights, b.d_weights));
  EXPECT_TRUE(same_bits(a.gradients.router.gate, b.gradients.router.gate));
  EXPECT_TRUE(same_bits(a.gradients.router.gate_bias, b.gradients.router.gate_bias));
  expect_same_bits(a.gradients.shared, b.gradients.shared);
  for (std::size_t e = 0; e < b.gradients.experts.size(); ++e) {
    expect_same_bits(a.gradients.experts[e], b.gradients.experts[e]);
  }
  EXPECT_EQ(a.losses.balance, b.losses.balance);
  EXPECT_EQ(a.losses.z, b.losses.z);
}

void expect_reference(const LayerCase& c, const CaseInput& in, const LayerOutcome& actual,
                      double tolerance) {
  Oracle oracle(c, in, actual);
  const auto ids = actual.expert_ids.span<std::int32_t>();
  EXPECT_EQ(std::vector<std::int32_t>(ids.begin(), ids.end()), oracle.picks());
  EXPECT_TRUE(near(actual.y, oracle.y(), tolerance)) << "y";
  const auto expected = oracle.gradients();
  if (c.num_tokens > 0) {  // no tokens: nothing to compare
    EXPECT_TRUE(near(actual.d_x, tensor_of(expected.d_x), tolerance)) << "d_x";
    EXPECT_TRUE(near(actual.d_weights, tensor_of(expected.d_weights), tolerance)) << "d_weights";
  }
  EXPECT_TRUE(
      near(actual.gradients.router.gate, tensor_of(expected.weights.router.gate), tolerance))
      << "the router's gate";
  if (expected.weights.router.gate_bias.is_given()) {
    EXPECT_TRUE(near(actual.gradients.router.gate_bias,
                     tensor_of(expected.weights.router.gate_bias), tolerance))
        << "the router's gate_bias";
  }
  for (std::size_t e = 0; e < expected.weights.experts.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_near(actual.gradients.experts[e], expected.weights.experts[e], tolerance);
  }
  SCOPED_TRACE("shared");
  expect_near(actual.gradients.shared, expected.weights.shared, tolerance);
  if (c.options.losses.balance == BalanceLoss::none && !c.options.losses.z) return;
  const auto losses = oracle.losses();
  if (c.options.losses.balance != BalanceLoss::none) {
    EXPECT_NEAR(actual.losses.balance, losses.balance, 1e-5 * losses.balance);
  }
  if (c.options.losses.z) {
    EXPECT_NEAR(actual.losses.z, losses.z, 1e-5 * losses.z);
  }
}

}  // namespace switchyard::testing
