// SPDX-License-Identifier: Apache-2.0
// The whole model's gradients against differences of its loss.
#include "model/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/random.h"
#include "support/compare.h"
#include "switchyard/run_ranks.h"
#include "train/tiny_run.h"

namespace switchyard::transformer_test {
namespace {

using testing::MeshSizes;
using testing::tiny_config;
using train::Balance;
using train::ModelConfig;
using train::ParameterView;
using train::TokenBatch;
using train::Transformer;

std::vector<std::string> random_windows(std::int64_t count, std::int64_t length) {
  std::vector<std::string> windows(static_cast<std::size_t>(count));
  std::uint64_t n = 0;
  for (auto& window : windows) {
    for (std::int64_t i = 0; i <= length; ++i) {
      window += static_cast<char>('a' + train::random_bits(9, n++) % 26);
    }
  }
  return windows;
}

TokenBatch batch_of(Mesh& mesh, const ModelConfig& config, std::int64_t count) {
  static const auto windows = random_windows(8, 32);
  std::vector<std::string_view> views;
  for (std::int64_t i = 0; i < count; ++i) {
    views.push_back(std::string_view(windows[static_cast<std::size_t>(i)])
                        .substr(0, static_cast<std::size_t>(config.context) + 1));
  }
  return train::cut_batch(mesh, views, config.context);
}

// Returns the loss that is trained: cross-entropy plus the weighted losses of the routers.
double total_loss(Transformer& model, const TokenBatch& batch) {
  const auto losses = model.loss_and_gradients(batch);
  const ModelConfig& c = model.config();
  return losses.cross_entropy +
         (c.balance == Balance::loss ? double{c.balance_weight} * losses.balance : 0.0) +
         double{c.z_weight} * losses.z;
}

// The slope of the loss along `direction` of one tensor: from four points, so that curvature does
// not count.
double slope(Transformer& model, const TokenBatch& batch, const TensorView& values,
             const std::vector<double>& direction) {
  constexpr double kStep = 2e-3;
  const auto span = values.span<float>();
  const std::vector<float> before(span.begin(), span.end());
  const auto loss_at = [&](double distance) {
    for (std::size_t i = 0; i < span.size(); ++i) {
      span[i] = static_cast<float>(before[i] + distance * direction[i]);
    }
    return total_loss(model, batch);
  };
  const double near = loss_at(kStep) - loss_at(-kStep);
  const double far = loss_at(2.0 * kStep) - loss_at(-2.0 * kStep);
  std::copy(before.begin(), before.end(), span.begin());
  return (8.0 * near - far) / (12.0 * kStep);
}

// Returns two vectors of length 1: the gradient's direction, and a random one.
std::vector<std::vector<double>> directions(const std::vector<float>& gradient,
                                            std::uint64_t seed) {
  std::vector<std::vector<double>> result(2);
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    result[0].push_back(gradient[i]);
    result[1].push_back(train::random_unit(seed, i) - 0.5);
  }
  for (auto& direction : result) {
    double square = 0.0;
    for (const double d : direction) square += d * d;
    for (double& d : direction) d /= std::sqrt(square) + 1e-30;
  }
  return result;
}

void expect_gradients(const ModelConfig& config) {
  run_ranks(1, [&](Communicator& world) {
    const MeshSizes one;
    Mesh mesh(world, one.axes());
    Transformer model(config, one.config(), mesh, Device(), 5);
    const TokenBatch batch = batch_of(mesh, config, 3);
    total_loss(model, batch);
    const auto values = model.values().views();
    const auto gradients = model.gradients().views();
    std::vector<std::vector<float>> kept;
    double norm = 0.0;
    for (const ParameterView& view : gradients) {
      const auto span = view.values.span<float>();
      kept.emplace_back(span.begin(), span.end());
      for (const float g : span) norm += double{g} * double{g};
    }
    norm = std::sqrt(norm);
    for (std::size_t t = 0; t < values.size(); ++t) {
      for (const auto& direction : directions(kept[t], t)) {
        double expected = 0.0;
        for (std::size_t i = 0; i < direction.size(); ++i) expected += direction[i] * kept[t][i];
        // f32 sums limit differences to about 1e-4 of the whole gradient.
        EXPECT_NEAR(slope(model, batch, values[t].values, direction), expected,
                    5e-3 * std::abs(expected) + 2e-4 * norm)
            << values[t].name;
      }
    }
  });
}

ModelConfig every_pick() {
  ModelConfig config = tiny_config().model;
  config.top_k = config.experts;  // a choice would make the loss jump
  return config;
}

TEST(Transformer, Gradients) { expect_gradients(every_pick()); }

TEST(Transformer, GradientsWithLosses) {
  ModelConfig config = every_pick();
  config.balance = Balance::loss;
  config.balance_weight = 0.5F;
  config.z_weight = 0.1F;
  expect_gradients(config);
}

TEST(Transformer, GradientsOfDenseLayersSharedExpertsAndAHeadOfItsOwn) {
  ModelConfig config = every_pick();
  config.moe_every = 2;
  config.shared_intermediate = 8;
  config.tied = false;
  expect_gradients(config);
}

// A prediction depends only on earlier tokens. (Its bits may differ, because an expert multiplies
// all its rows together.)
TEST(Transformer, IsCausal) {
  run_ranks(1, [&](Communicator& world) {
    const ModelConfig config = tiny_config().model;
    const MeshSizes one;
    Mesh mesh(world, one.axes());
    Transformer model(config, one.config(), mesh, Device(), 5);
    TokenBatch batch = batch_of(mesh, config, 1);
    const Tensor before = model.logits(batch);
    batch.tokens.back() ^= 1;
    const Tensor after = model.logits(batch);
    const auto last = config.context - 1;
    EXPECT_TRUE(testing::near(after.view().slice(0, last), before.view().slice(0, last), 1e-6));
    EXPECT_FALSE(testing::near(after.view().slice(last, last + 1),
                               before.view().slice(last, last + 1), 1e-3));
  });
}

// Evaluation leaves no trace in what training counts.
TEST(Transformer, EvaluationCountsNothing) {
  run_ranks(1, [&](Communicator& world) {
    const ModelConfig config = tiny_config().model;
    const MeshSizes one;
    Mesh mesh(world, one.axes());
    Transformer model(config, one.config(), mesh, Device(), 5);
    const TokenBatch batch = batch_of(mesh, config, 2);
    const double loss = model.loss(batch);
    EXPECT_TRUE(model.times().stages().empty());
    EXPECT_EQ(model.moe_layers()[0]->pick_counts().num_tokens, 0);
    EXPECT_EQ(model.loss_and_gradients(batch).cross_entropy, loss);
    EXPECT_EQ(model.moe_layers()[0]->pick_counts().num_tokens, 2 * config.context);
  });
}

}  // namespace
}  // namespace switchyard::transformer_test
