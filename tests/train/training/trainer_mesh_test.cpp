// SPDX-License-Identifier: Apache-2.0
// Any mesh makes the same step: the losses of a run do not depend on how it is divided.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "switchyard/run_ranks.h"
#include "train/tiny_run.h"

namespace switchyard::trainer_mesh_test {
namespace {

using testing::MeshSizes;
using testing::tiny_config;
using testing::tiny_corpus;
using train::StepRecord;
using train::TrainConfig;
using train::Trainer;

struct Outcome {
  std::vector<StepRecord> steps;
  double held_out = 0.0;
  std::vector<std::vector<std::int64_t>> load;
};

// Every rank's outcome is asked to be the same; rank 0's is returned.
Outcome run(TrainConfig config, const MeshSizes& sizes, int threads = 1) {
  config.mesh = sizes.config();
  std::vector<Outcome> outcomes(static_cast<std::size_t>(sizes.ranks()));
  run_ranks(sizes.ranks(), [&](Communicator& world) {
    Mesh mesh(world, sizes.axes());
    Trainer trainer(config, mesh, Device::cpu({.num_threads = threads}), tiny_corpus());
    Outcome& outcome = outcomes[static_cast<std::size_t>(world.rank())];
    for (int i = 0; i < config.steps; ++i) outcome.steps.push_back(trainer.step());
    outcome.held_out = trainer.held_out_loss();
    outcome.load = trainer.take_load();
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.steps.back().loss, outcomes[0].steps.back().loss);
    EXPECT_EQ(outcome.steps.back().gradient_norm, outcomes[0].steps.back().gradient_norm);
    EXPECT_EQ(outcome.held_out, outcomes[0].held_out);
    EXPECT_EQ(outcome.load, outcomes[0].load);
  }
  return outcomes[0];
}

void expect_close(const Outcome& a, const Outcome& b) {
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_NEAR(a.steps[i].loss, b.steps[i].loss, 1e-4 * b.steps[i].loss) << "step " << i + 1;
    EXPECT_NEAR(a.steps[i].gradient_norm, b.steps[i].gradient_norm, 1e-2 * b.steps[i].gradient_norm)
        << "step " << i + 1;
    EXPECT_NEAR(a.steps[i].balance_loss, b.steps[i].balance_loss,
                1e-3 * std::abs(b.steps[i].balance_loss));
  }
  EXPECT_NEAR(a.held_out, b.held_out, 1e-4 * b.held_out);
}

struct Case {
  std::string name;
  TrainConfig config;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  const auto add = [&](const std::string& name, const auto& change) {
    result.push_back({name, tiny_config()});
    change(result.back().config);
  };
  add("bias", [](TrainConfig&) {});
  add("loss", [](TrainConfig& c) {
    c.model.balance = train::Balance::loss;
    c.model.z_weight = 1e-3F;
  });
  add("mixed", [](TrainConfig& c) {
    c.model.moe_every = 2;
    c.model.shared_intermediate = 8;
    c.model.tied = false;
  });
  add("bounded", [](TrainConfig& c) { c.model.sizing = train::BufferSizing::bounded; });
  return result;
}

const std::vector<MeshSizes> kMeshes{
    {.ep = 2},          {.dp = 2},
    {.sp = 2},          {.ep = 4},
    {.dp = 2, .ep = 2}, {.ep = 2, .sp = 2},
    {.sp = 4},          {.ep = 2, .sp = 2, .expert_axes = {"ep", "sp"}},
    {.dp = 2, .sp = 2}, {.ep = 3},
    {.ep = 6}};

class TrainerMesh : public ::testing::TestWithParam<MeshSizes> {};

TEST_P(TrainerMesh, LossesAreThoseOfOneRank) {
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const Outcome alone = run(test.config, {});
    EXPECT_LT(alone.steps.back().loss, 0.8 * alone.steps.front().loss);
    expect_close(run(test.config, GetParam()), alone);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, TrainerMesh, ::testing::ValuesIn(kMeshes),
                         [](const auto& mesh) { return mesh.param.name(); });

// A run that is repeated, or made with more threads, has the same bits.
TEST(TrainerBits, AreTheSameInEveryRunWithAnyThreads) {
  const MeshSizes mesh{.ep = 2, .sp = 2};
  const Outcome first = run(tiny_config(), mesh);
  for (const int threads : {1, 3}) {
    const Outcome again = run(tiny_config(), mesh, threads);
    for (std::size_t i = 0; i < first.steps.size(); ++i) {
      EXPECT_EQ(again.steps[i].loss, first.steps[i].loss) << threads << " threads, step " << i + 1;
      EXPECT_EQ(again.steps[i].gradient_norm, first.steps[i].gradient_norm);
    }
    EXPECT_EQ(again.load, first.load);
  }
}

TEST(TrainerBits, DependOnTheSeed) {
  auto config = tiny_config();
  const double first = run(config, {}).steps[0].loss;
  config.seed = 2;
  EXPECT_NE(run(config, {}).steps[0].loss, first);
}

// Buffers that are too small make a step run again, and the same step.
TEST(TrainerBits, BoundedBuffersChangeNothing) {
  auto config = tiny_config();
  config.data.batch = 9;
  const MeshSizes mesh{.ep = 2};
  const Outcome exact = run(config, mesh);
  config.model.sizing = train::BufferSizing::bounded;
  const Outcome bounded = run(config, mesh);
  EXPECT_EQ(bounded.steps[0].ran_again, 1);
  for (std::size_t i = 0; i < exact.steps.size(); ++i) {
    EXPECT_EQ(bounded.steps[i].loss, exact.steps[i].loss) << "step " << i + 1;
  }
  EXPECT_EQ(bounded.load, exact.load);
}

}  // namespace
}  // namespace switchyard::trainer_mesh_test
