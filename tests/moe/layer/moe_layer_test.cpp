// SPDX-License-Identifier: Apache-2.0
// The whole layer against the reference: y and every gradient, on one rank and on several.
#include "switchyard/moe_layer.h"

#include <gtest/gtest.h>

#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"

namespace switchyard::moe_layer_test {
namespace {

using testing::doubles_of;
using testing::expect_near;
using testing::near;
using testing::on_ranks;
using testing::part_of;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::tensor_of;

struct Case {
  std::string name;
  MoeLayerOptions options;
  Biases biases = Biases::none;
};

MoeLayerOptions base_options() {
  return {.hidden = 10, .intermediate = 5, .router = RouterOptions::mixtral(6, 3)};
}

// One thing changed at a time, and what may disturb each other together.
std::vector<Case> cases() {
  std::vector<Case> result;
  const auto add = [&](std::string name, auto change, Biases biases = Biases::none) {
    result.push_back({std::move(name), base_options(), biases});
    change(result.back().options);
  };
  add("mixtral", [](auto&) {});
  add("qwen3_moe", [](auto& o) { o.router = RouterOptions::qwen3_moe(8, 4); });
  add("olmoe", [](auto& o) { o.router = RouterOptions::olmoe(6, 3); });
  add("deepseek_v3", [](auto& o) {
    o.router = RouterOptions::deepseek_v3(16, 3);
    o.shared_intermediate = 6;
  });
  add("torchtitan", [](auto& o) {
    o.router = RouterOptions::torchtitan(6, 3);
    o.weight_stage = WeightStage::input;
    o.shared_intermediate = 4;
  });
  add("kempner_forge_softmax",
      [](auto& o) { o.router = RouterOptions::kempner_forge_softmax(6, 2); });
  add("kempner_forge_sigmoid",
      [](auto& o) { o.router = RouterOptions::kempner_forge_sigmoid(6, 2); });
  for (const auto& form : testing::kActivationForms) {
    const auto change = [&](auto& o) {
      o = form.in(o);
      o.shared_intermediate = 7;
      o.clamp_limit = 0.5F;
    };
    add(testing::name_of(form), change);
    add(testing::name_of(form) + " with biases", change, Biases::all);
  }
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      add(
          "stage " + std::string(name_of(stage)) + ", keep " + std::to_string(int(keep)),
          [=](auto& o) {
            o.weight_stage = stage;
            o.keep = keep;
            o.shared_intermediate = 3;
          },
          Biases::all);
    }
  }
  // Twelve tokens are cut so that each rank's count begins at expert 0, as the reference's does.
  add("balanced", [](auto& o) { o.router.choice = Choice::balanced; });
  add("aligned", [](auto& o) { o.alignment = 16; });
  add(
      "bounded", [](auto& o) { o.sizing = Sizing::bounded(150); }, Biases::all);
  add(
      "packed", [](auto& o) { o.mover = MoverKind::packed; }, Biases::all);
  add("pre_reduced", [](auto& o) {
    o.mover = MoverKind::packed;
    o.combine = CombineMode::pre_reduced;
    o.weight_stage = WeightStage::activation;
  });
  return result;
}

// The global sequence: ranks hold consecutive parts of it, one of them none.
struct Sequence {
  explicit Sequence(const MoeLayerOptions& options, std::int64_t num_tokens = 12) {
    Random random(21);
    x = random.tensor({num_tokens, options.hidden}, options.dtype);
    d_y = random.tensor({num_tokens, options.hidden}, options.dtype);
  }
  std::pair<std::int64_t, std::int64_t> part(const Communicator& comm) const {
    if (comm.size() == 1) return {0, x.rows()};
    const auto first = x.rows() * std::max(comm.rank() - 1, 0) / (comm.size() - 1);
    return {comm.rank() == 0 ? 0 : first, x.rows() * comm.rank() / (comm.size() - 1)};
  }

  Tensor x, d_y;
};

struct Results {
  Tensor y, d_x, d_weights;
  MoeGradients gradients;
};

Results run_step(MoeLayer& layer, const MoeWeights& weights, const Sequence& sequence) {
  const auto [first, last] = sequence.part(layer.communicator());
  const auto x = sequence.x.view().slice(first, last);
  SavedForBackward saved;
  Results results{.y = layer.forward(weights, {.x = x}, saved),
                  .d_x = Tensor(x.shape(), x.dtype()),
                  .d_weights = Tensor({x.rows(), layer.options().router.top_k}, Dtype::f32),
                  .gradients = testing::gradients_for(weights)};
  layer.backward(
      weights, saved, sequence.d_y.view().slice(first, last),
      {.d_x = results.d_x, .gradients = results.gradients, .d_weights = results.d_weights});
  return results;
}

// The expected values of all ranks.
struct Expected {
  Expected(const MoeLayerOptions& options, const MoeWeights& weights, const Sequence& sequence) {
    const auto reference = doubles_of(weights);
    const auto x = doubles_of(sequence.x.view());
    const auto routing = testing::reference_route(options.router, reference.router, x);
    y = tensor_of(testing::reference_layer(options, reference, x, routing));
    gradients = testing::numeric_gradients(options, reference, x, routing.expert_ids,
                                           doubles_of(sequence.d_y.view()));
    d_x = tensor_of(gradients.d_x);
    d_weights = tensor_of(gradients.d_weights);
  }

  Tensor y, d_x, d_weights;
  testing::NumericLayerGradients gradients;
};

void sum_over_ranks(Communicator& comm, const MoeGradients& gradients) {
  auto replicated = testing::named_tensors(gradients.shared);
  replicated.emplace_back("gate", gradients.router.gate);
  replicated.emplace_back("gate_bias", gradients.router.gate_bias);
  for (const auto& [name, tensor] : replicated) {
    if (tensor.data() != nullptr) comm.all_reduce(tensor);
  }
}

void expect_reference(Communicator& comm, const ExpertPlacement& placement,
                      const Sequence& sequence, const Results& actual, const Expected& expected) {
  const auto [first, last] = sequence.part(comm);
  const auto mine = [&](const Tensor& whole) { return whole.view().slice(first, last); };
  EXPECT_TRUE(near(actual.y, mine(expected.y), 1e-5));
  EXPECT_TRUE(near(actual.d_x, mine(expected.d_x), 1e-4));
  EXPECT_TRUE(near(actual.d_weights, mine(expected.d_weights), 1e-4));
  const auto experts = placement.experts_of(comm.rank());
  for (std::size_t i = 0; i < experts.size(); ++i) {
    SCOPED_TRACE("expert " + std::to_string(experts[i]));
    expect_near(actual.gradients.experts[i],
                expected.gradients.weights.experts[static_cast<std::size_t>(experts[i])], 1e-4);
  }
  sum_over_ranks(comm, actual.gradients);
  SCOPED_TRACE("replicated");
  const auto& router = expected.gradients.weights.router;
  EXPECT_TRUE(near(actual.gradients.router.gate, tensor_of(router.gate), 1e-4));
  if (router.gate_bias.is_given()) {
    EXPECT_TRUE(near(actual.gradients.router.gate_bias, tensor_of(router.gate_bias), 1e-4));
  }
  expect_near(actual.gradients.shared, expected.gradients.weights.shared, 1e-4);
}

// The reference takes the experts' options from the layer's, too.
TEST(MoeLayerOptions, ReachBothKindsOfExperts) {
  auto options = base_options();
  options.activation = Activation::clamped_swiglu;
  options.shared_activation = Activation::limited_swiglu;
  options.clamp_limit = 3.0F;
  options.gate_alpha = 2.0F;
  options.up_offset = -1.0F;
  EXPECT_EQ(options.experts().activation, Activation::clamped_swiglu);
  EXPECT_EQ(options.shared_expert().activation, Activation::limited_swiglu);
  for (const ExpertsOptions& experts : {options.experts(), options.shared_expert()}) {
    EXPECT_EQ(experts.clamp_limit, 3.0F);
    EXPECT_EQ(experts.gate_alpha, 2.0F);
    EXPECT_EQ(experts.up_offset, -1.0F);
  }
}

class MoeLayerTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(MoeLayerTest, EqualsTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Random random(5);
    const auto weights = random_layer(random, c.options, c.biases);
    const Sequence sequence(c.options);
    const Expected expected(c.options, weights, sequence);
    on_ranks(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(c.name);
      const auto placement = ExpertPlacement::contiguous(c.options.router.num_experts, comm.size());
      MoeLayer layer(comm, placement, c.options);
      const auto part = part_of(weights, placement, comm.rank());
      expect_reference(comm, placement, sequence, run_step(layer, part, sequence), expected);
    });
  }
}

// Each value is rounded to bf16 some six times on the way to d_x: experts, router, shared expert.
TEST_P(MoeLayerTest, Bf16IsNearTheReference) {
  auto options = base_options();
  options.dtype = Dtype::bf16;
  options.shared_intermediate = 4;
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    options.weight_stage = stage;
    Random random(5);
    const auto weights = random_layer(random, options, Biases::all);
    const Sequence sequence(options);
    const Expected expected(options, weights, sequence);
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto placement = ExpertPlacement::contiguous(6, comm.size());
      MoeLayer layer(comm, placement, options);
      const auto results = run_step(layer, part_of(weights, placement, comm.rank()), sequence);
      const auto [first, last] = sequence.part(comm);
      EXPECT_TRUE(near(results.y, expected.y.view().slice(first, last), 1e-2));
      EXPECT_TRUE(near(results.d_x, expected.d_x.view().slice(first, last), 1e-2));
      EXPECT_TRUE(near(results.d_weights, expected.d_weights.view().slice(first, last), 1e-2));
      const auto experts = placement.experts_of(comm.rank());
      for (std::size_t i = 0; i < experts.size(); ++i) {
        expect_near(results.gradients.experts[i],
                    expected.gradients.weights.experts[static_cast<std::size_t>(experts[i])], 2e-2);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, MoeLayerTest, ::testing::ValuesIn([] {
                           auto cases = testing::rank_cases_of(1);
                           for (const auto& c : testing::rank_cases_of(3)) cases.push_back(c);
                           return cases;
                         }()),
                         testing::rank_case_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MoeLayerTest);

}  // namespace
}  // namespace switchyard::moe_layer_test
