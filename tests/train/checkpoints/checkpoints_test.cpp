// SPDX-License-Identifier: Apache-2.0
// A run goes on from its checkpoint, whatever mesh it is on.
#include "checkpoints/checkpoints.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "train/saved_run.h"

namespace switchyard::train::checkpoints_test {
namespace {

namespace fs = std::filesystem;

struct MeshCase {
  int ranks = 1;
  MeshConfig mesh;
};

std::vector<MeshCase> mesh_cases() {
  return {{1, {}},
          {3, {}},
          {4, {.dp = 2}},
          {4, {.dp = 2, .ep = 1, .sp = 2}},
          {4, {.sp = 2, .expert_axes = {"ep", "sp"}}},
          {8, {}}};  // some ranks own no expert
}

void expect_same_tensors(const fs::path& a, const fs::path& b) {
  const auto first = Checkpoint::open(a);
  const auto second = Checkpoint::open(b);
  ASSERT_EQ(first.names(), second.names());
  for (const auto& [name, view] : first.tensors()) {
    const auto other = second.tensor(name);
    ASSERT_EQ(view.shape(), other.shape()) << name;
    const auto bytes = static_cast<std::size_t>(view.bytes());
    EXPECT_EQ(std::memcmp(view.data(), other.data(), bytes), 0) << name;
  }
}

class CheckpointsTest : public SavedRun {
 protected:
  // The losses of steps first + 1 … last of a run that saves nothing.
  std::vector<double> losses(const TrainConfig& config, int ranks, std::int64_t last,
                             const fs::path& resumed = {}) const {
    std::vector<double> all;
    run_ranks(ranks, [&](Communicator& world) {
      SmallRun run(world, config);
      if (!resumed.empty()) load(run.trainer, read_header(resumed));
      std::vector<double> own;
      while (run.trainer.progress().step < last) own.push_back(run.trainer.step().loss);
      own.push_back(run.trainer.held_out_loss());
      if (world.rank() == 0) all = own;
    });
    return all;
  }
};

TEST_F(CheckpointsTest, ARunGoesOnBitwiseAtTheSameMesh) {
  for (const auto balance : {Balance::bias, Balance::loss, Balance::none}) {
    for (const auto& [ranks, mesh] : mesh_cases()) {
      fs::remove_all(folder_.path());
      auto config = with_mesh(small_config(), mesh);
      config.model.balance = balance;
      train(config, ranks, 2);
      const auto straight = losses(config, ranks, 5);
      const auto resumed = losses(config, ranks, 5, folder_ / kTwo);
      ASSERT_EQ(straight.size(), 6U);
      ASSERT_EQ(resumed.size(), 4U);
      EXPECT_TRUE(std::ranges::equal(resumed, std::vector(straight.end() - 4, straight.end())))
          << ranks << " ranks";
    }
  }
}

TEST_F(CheckpointsTest, ARunGoesOnAtOtherMeshes) {
  train(with_mesh(small_config(), {.dp = 2}), 4, 2);
  const auto straight = losses(small_config(), 1, 5);
  for (const auto& [ranks, mesh] : mesh_cases()) {
    const auto resumed = losses(with_mesh(small_config(), mesh), ranks, 5, folder_ / kTwo);
    ASSERT_EQ(resumed.size(), 4U);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(resumed[i] / straight[2 + i], 1.0, 1e-4) << ranks << " ranks, " << i;
    }
  }
}

// Loaded and saved at once: all that is in the file was loaded, and its sums are any mesh's.
TEST_F(CheckpointsTest, EverythingComesBackAtEveryMesh) {
  train(with_mesh(small_config(), {.dp = 2}), 4, 2);
  const auto original = read_header(folder_ / kTwo);
  for (const auto& [ranks, mesh] : mesh_cases()) {
    const testing::Folder other;
    auto config = with_mesh(small_config(), mesh);
    config.seed = 7;  // what is not loaded would differ
    run_ranks(ranks, [&](Communicator& world) {
      SmallRun run(world, config);
      load(run.trainer, read_header(folder_.path()));
      save(run.trainer, other.path(), 1);
    });
    expect_same_tensors(folder_ / kTwo, other / kTwo);
    const auto header = read_header(other.path());
    EXPECT_EQ(header.parameters_sum, original.parameters_sum) << ranks << " ranks";
    EXPECT_EQ(header.training_sum, original.training_sum) << ranks << " ranks";
    EXPECT_EQ(header.progress.step, 2);
    EXPECT_EQ(header.progress.position, 8);
    EXPECT_EQ(header.config.seed, 7U);
    EXPECT_EQ(header.config.mesh.dp, mesh.dp);
  }
}

TEST_F(CheckpointsTest, TheBiasOfTheBalancingIsSaved) {
  train(small_config(), 2, 2);
  const auto checkpoint = Checkpoint::open(folder_ / kTwo);
  const auto bias = checkpoint.tensor("layers.1.mlp.gate.e_score_correction_bias");
  EXPECT_FALSE(std::ranges::all_of(bias.span<float>(), [](float b) { return b == 0.0F; }));
  EXPECT_EQ(checkpoint.tensor("balancer.0.moving_average").rows(), 5);
}

TEST_F(CheckpointsTest, OldCheckpointsAreRemoved) {
  train(small_config(), 2, 10);
  EXPECT_EQ(folder_.names(),
            (std::set<std::string>{"step-00000006.safetensors", "step-00000008.safetensors",
                                   "step-00000010.safetensors"}));
  EXPECT_EQ(read_header(folder_.path()).path, folder_ / "step-00000010.safetensors");
}

TEST_F(CheckpointsTest, ParametersAloneAreLoadedForSampling) {
  train(small_config(), 2, 2);
  rewrite(kTwo, [](CheckpointContents& contents) {
    std::erase_if(contents.tensors,
                  [](const auto& entry) { return entry.first.starts_with("optimizer."); });
  });
  run_ranks(2, [&](Communicator& world) {
    SmallRun run(world, with_mesh(small_config(), {}));
    load_values(run.trainer.model(), read_header(folder_.path()));
    const auto loaded = Checkpoint::open(folder_ / kTwo).tensor("embedding");
    EXPECT_TRUE(std::ranges::equal(run.trainer.model().values().embedding().span<float>(),
                                   loaded.span<float>()));
  });
}

TEST_F(CheckpointsTest, AFailedFirstSaveSaysThatThereIsNoCheckpoint) {
  train(small_config(), 2, 2);
  run_ranks(2, [&](Communicator& world) {
    SmallRun run(world, small_config());
    load(run.trainer, read_header(folder_.path()));
    run.trainer.step();
    const auto file = folder_ / kTwo / "folder";
    EXPECT_EQ(in_words(testing::error_of<StorageError>([&] { save(run.trainer, file, 3); })),
              "save_checkpoint: rank 0: cannot create DIR/step-00000002.safetensors/folder/"
              "step-00000003.safetensors: Not a directory; there is no checkpoint in "
              "DIR/step-00000002.safetensors/folder yet");
  });
}

}  // namespace
}  // namespace switchyard::train::checkpoints_test
