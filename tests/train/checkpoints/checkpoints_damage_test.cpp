// SPDX-License-Identifier: Apache-2.0
// Every kind of damage is found, named on every rank, and another checkpoint offered.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "train/saved_run.h"

namespace switchyard::train::checkpoints_damage_test {
namespace {

const std::string kOffer = "; use the one before it, DIR/step-00000002.safetensors";

// Two checkpoints, of which the second is damaged.
class CheckpointsDamage : public SavedRun {
 protected:
  void SetUp() override { train(small_config(), 2, 4); }

  static std::string damaged(const std::string& what) {
    return "DIR/step-00000004.safetensors is damaged: " + what + kOffer;
  }
};

TEST_F(CheckpointsDamage, ABitOfEveryTensor) {
  const auto whole = bytes_of(kFour);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), sizeof(header_bytes));
  const auto header = nlohmann::json::parse(whole.substr(8, header_bytes));
  testing::Random random(1);
  int tensors = 0;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
    const auto at =
        begin + static_cast<std::size_t>(random.below(static_cast<std::int64_t>(end - begin)));
    auto bytes = whole;
    bytes[8 + header_bytes + at] ^= static_cast<char>(1U << random.below(8));
    put(kFour, bytes);
    const bool of_training = name.starts_with("optimizer.") || name.starts_with("balancer.") ||
                             name.starts_with("history.");
    EXPECT_EQ(load_error(folder_.path()),
              damaged(of_training ? "the bytes of the optimizer's state do not match their checksum"
                                  : "the bytes of the parameters do not match their checksum"))
        << name;
    ++tensors;
  }
  EXPECT_GT(tensors, 30);
  put(kFour, whole);
  EXPECT_EQ(load_error(folder_.path()), "no error");
}

// Except in the two words that only other tools read.
TEST_F(CheckpointsDamage, ABitAnywhereInTheHeader) {
  const auto whole = bytes_of(kFour);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), sizeof(header_bytes));
  const std::string not_ours = "\"format\":\"pt\"";
  const auto begin = whole.find(not_ours);
  ASSERT_LT(begin, header_bytes);
  const auto alone = connect();
  SmallRun run(*alone, small_config());
  testing::Random random(2);
  for (int round = 0; round < 500; ++round) {
    const auto at =
        static_cast<std::size_t>(random.below(static_cast<std::int64_t>(header_bytes) + 8));
    auto bytes = whole;
    bytes[at] ^= static_cast<char>(1U << random.below(8));
    put(kFour, bytes);
    const auto error = in_words(testing::error_of<InvalidArgument>(
        [&] { load(run.trainer, read_header(folder_.path())); }));
    const bool is_ours = at < begin || at >= begin + not_ours.size();
    EXPECT_TRUE(!is_ours || error.starts_with("DIR/step-00000004.safetensors"))
        << "byte " << at << ": " << error;
  }
}

TEST_F(CheckpointsDamage, AFileThatIsCutOff) {
  const auto whole = bytes_of(kFour);
  for (const std::size_t left :
       {std::size_t{0}, std::size_t{5}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
    put(kFour, whole.substr(0, left));
    const auto error = load_error(folder_.path());
    EXPECT_TRUE(error.starts_with("DIR/step-00000004.safetensors is damaged: ")) << error;
    EXPECT_TRUE(error.ends_with(kOffer)) << error;
  }
  put(kFour, "");
  EXPECT_EQ(header_error(folder_.path()),
            damaged("has 0 bytes, but a safetensors file begins with a length of 8"));
}

TEST_F(CheckpointsDamage, AHeaderThatIsNotJson) {
  auto bytes = bytes_of(kFour);
  bytes[8] = 'x';
  put(kFour, bytes);
  EXPECT_EQ(header_error(folder_.path()),
            damaged("the header is not valid JSON from its byte 1 on"));
}

TEST_F(CheckpointsDamage, ATensorThatIsMissing) {
  for (const auto* name :
       {"final_norm", "layers.0.attention.qkv", "optimizer.second.embedding",
        "layers.1.mlp.gate.e_score_correction_bias", "layers.1.mlp.experts.down_proj",
        "balancer.0.moving_average", "history.loads"}) {
    const auto whole = bytes_of(kFour);
    rewrite(kFour, [&](CheckpointContents& contents) { contents.tensors.erase(name); });
    const auto error = load_error(folder_.path());
    EXPECT_TRUE(error.starts_with("DIR/step-00000004.safetensors is damaged: ")) << error;
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_TRUE(error.ends_with(kOffer)) << error;
    put(kFour, whole);
  }
}

TEST_F(CheckpointsDamage, ATensorOfAnotherShape) {
  rewrite(kFour, [](CheckpointContents& contents) {
    contents.tensors["final_norm"] = Tensor::zeros({17}, Dtype::f32);
  });
  EXPECT_EQ(load_error(folder_.path()),
            damaged("final_norm of DIR/step-00000004.safetensors is f32 [17], which cannot be "
                    "loaded into f32 [16]"));
}

TEST_F(CheckpointsDamage, TheOfferedCheckpointIsGood) {
  put(kFour, "");
  EXPECT_EQ(load_error(folder_ / kTwo), "no error");
  EXPECT_EQ(load_error(folder_ / kTwo, 3), "no error");
}

TEST_F(CheckpointsDamage, TheOnlyCheckpointOffersNoOther) {
  std::filesystem::remove(folder_ / kTwo);
  put(kFour, "");
  EXPECT_EQ(header_error(folder_ / kFour),
            "DIR/step-00000004.safetensors is damaged: has 0 bytes, but a safetensors file begins "
            "with a length of 8; there is no other checkpoint in DIR");
}

TEST_F(CheckpointsDamage, AMissingCheckpoint) {
  EXPECT_EQ(header_error(folder_ / "none"), "there is no checkpoint DIR/none");
  std::filesystem::create_directory(folder_ / "empty");
  EXPECT_EQ(header_error(folder_ / "empty"),
            "there is no checkpoint, such as step-00000400.safetensors, in the folder DIR/empty");
}

TEST_F(CheckpointsDamage, ACheckpointRemovedAfterItsHeaderWasReadIsStillLoaded) {
  const auto alone = connect();
  SmallRun run(*alone, small_config());
  const auto header = read_header(folder_.path());
  std::filesystem::remove(folder_ / kTwo);
  std::filesystem::remove(folder_ / kFour);
  load(run.trainer, header);
  EXPECT_EQ(run.trainer.progress().step, 4);
}

TEST_F(CheckpointsDamage, ACheckpointTruncatedAfterItsHeaderWasReadIsAnErrorOnEveryRank) {
  for (const bool of_training : {false, true}) {
    const auto whole = bytes_of(kFour);
    run_ranks(2, [&](Communicator& world) {
      SmallRun run(world, small_config());
      const auto header = read_header(world, folder_.path());
      if (world.rank() == 0) std::filesystem::resize_file(folder_ / kFour, 6000);
      world.barrier();
      const auto error = in_words(testing::error_of<StorageError>([&] {
        of_training ? load(run.trainer, header) : load_values(run.trainer.model(), header);
      }));
      EXPECT_NE(
          error.find("DIR/step-00000004.safetensors was truncated while it was being read: of its"),
          std::string::npos)
          << error;
    });
    put(kFour, whole);
  }
}

// While another thread saves and prunes as fast as it can.
TEST_F(CheckpointsDamage, AFolderBeingPrunedAlwaysHasANewestCheckpoint) {
  namespace fs = std::filesystem;
  const auto name = [&](int step) { return folder_ / fmt::format("step-{:08}.safetensors", step); };
  std::atomic<bool> is_done = false;
  std::jthread saver([&] {
    for (int step = 5; !is_done; ++step) {
      fs::create_hard_link(name(4), folder_ / "next");
      fs::rename(folder_ / "next", name(step));
      if (step > 5) fs::remove(name(step - 1));
    }
  });
  for (int i = 0; i < 200; ++i) EXPECT_EQ(header_error(folder_.path()), "no error");
  is_done = true;
}

}  // namespace
}  // namespace switchyard::train::checkpoints_damage_test
