// SPDX-License-Identifier: Apache-2.0
#include "training/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "common/random.h"
#include "switchyard/run_ranks.h"
#include "train/tiny_run.h"

namespace switchyard::adamw_test {
namespace {

using testing::MeshSizes;
using testing::tiny_config;
using train::AdamW;
using train::Compute;
using train::OptimizerConfig;
using train::ParameterSet;
using train::ParameterView;

TEST(LearningRate, WarmsUpAndFallsAlongACosine) {
  const OptimizerConfig config{.learning_rate = 1.0F, .final_learning_rate = 0.1F, .warm_up = 4};
  EXPECT_FLOAT_EQ(train::learning_rate(config, 0, 105), 0.25F);
  EXPECT_FLOAT_EQ(train::learning_rate(config, 3, 105), 1.0F);
  EXPECT_FLOAT_EQ(train::learning_rate(config, 4, 105), 1.0F);
  EXPECT_FLOAT_EQ(train::learning_rate(config, 54, 105), 0.55F);
  EXPECT_FLOAT_EQ(train::learning_rate(config, 104, 105), 0.1F);
  EXPECT_FLOAT_EQ(train::learning_rate(config, 1000, 105), 0.1F);
  EXPECT_FLOAT_EQ(train::learning_rate({.learning_rate = 1.0F, .warm_up = 0}, 0, 1), 1.0F);
}

// Gradients that depend on a tensor's name alone.
void fill(ParameterSet& set, std::uint64_t seed) {
  for (const ParameterView& view : set.views()) {
    std::uint64_t i = 0;
    const auto own = train::seed_of(view.name, seed);
    for (float& v : view.values.span<float>()) {
      v = static_cast<float>(train::random_unit(own, i++) - 0.5);
    }
  }
}

// As the paper has it, one element at a time in double.
struct Element {
  double value, m = 0.0, v = 0.0;
  void update(double g, double rate, bool decays, int step, const OptimizerConfig& c) {
    m = c.beta1 * m + (1.0 - c.beta1) * g;
    v = c.beta2 * v + (1.0 - c.beta2) * g * g;
    const double m_hat = m / (1.0 - std::pow(double{c.beta1}, step + 1));
    const double v_hat = v / (1.0 - std::pow(double{c.beta2}, step + 1));
    value -=
        rate * (m_hat / (std::sqrt(v_hat) + c.epsilon) + (decays ? c.weight_decay : 0.0) * value);
  }
};

TEST(AdamW, FollowsThePaper) {
  const auto model = tiny_config().model;
  const OptimizerConfig config{.weight_decay = 0.3F};
  ParameterSet values(model);
  ParameterSet gradients = values.like();
  fill(values, 1);
  std::vector<Element> expected;
  for (const auto& view : values.views()) {
    for (const float v : view.values.span<float>()) expected.push_back({v});
  }
  AdamW optimizer(config, values);
  Compute compute{Device()};
  for (int step = 0; step < 5; ++step) {
    fill(gradients, static_cast<std::uint64_t>(10 + step));
    optimizer.update(compute, values, gradients, step, 0.01F, 0.5F);
    std::size_t i = 0;
    for (const auto& view : gradients.views()) {
      for (const float g : view.values.span<float>()) {
        expected[i++].update(0.5 * double{g}, 0.01, view.decays, step, config);
      }
    }
  }
  std::size_t i = 0;
  for (const auto& view : values.views()) {
    for (const float v : view.values.span<float>()) {
      ASSERT_NEAR(v, expected[i++].value, 2e-5) << view.name;
    }
  }
}

TEST(AdamW, NormsAndTablesDecayAsTheyShould) {
  for (const auto& view : ParameterSet(tiny_config().model).views()) {
    EXPECT_EQ(view.decays, view.values.shape().rank() == 2) << view.name;
  }
}

// Experts count once, by their owner, whoever that is: the same bits at every number of ranks.
TEST(GradientNorm, DoesNotDependOnWhoOwnsExperts) {
  const auto model = tiny_config().model;
  double expected = 0.0;
  {
    ParameterSet whole(model);
    fill(whole, 3);
    for (const auto& view : whole.views()) {
      for (const float g : view.values.span<float>()) expected += double{g} * double{g};
    }
    expected = std::sqrt(expected);
  }
  std::vector<double> norms;
  for (const MeshSizes& sizes :
       {MeshSizes{}, MeshSizes{.ep = 2}, MeshSizes{.dp = 2, .ep = 4}, MeshSizes{.ep = 7}}) {
    std::vector<double> of_ranks(static_cast<std::size_t>(sizes.ranks()));
    run_ranks(sizes.ranks(), [&](Communicator& world) {
      Mesh mesh(world, sizes.axes());
      auto set = ParameterSet::random(model, 1, mesh, {"ep"});
      fill(set, 3);
      of_ranks[static_cast<std::size_t>(world.rank())] =
          train::gradient_norm(set, mesh.comm({"ep"}));
    });
    norms.insert(norms.end(), of_ranks.begin(), of_ranks.end());
  }
  for (const double norm : norms) {
    EXPECT_NEAR(norm, expected, 1e-6 * expected);
    EXPECT_EQ(norm, norms[0]);
  }
}

}  // namespace
}  // namespace switchyard::adamw_test
