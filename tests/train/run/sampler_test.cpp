// SPDX-License-Identifier: Apache-2.0
// Text is the same on every rank and at every mesh, and picks follow the probabilities.
#include "run/sampler.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "common/random.h"
#include "switchyard/run_ranks.h"
#include "train/small_run.h"

namespace switchyard::train::sampler_test {
namespace {

std::vector<float> logits_of(const std::vector<std::pair<int, float>>& some) {
  std::vector<float> logits(kVocabulary, -1e9F);
  for (const auto& [byte, logit] : some) logits[static_cast<std::size_t>(byte)] = logit;
  return logits;
}

TEST(PickByte, WithoutTemperatureTheLikeliestAndTheLowestOfEquals) {
  EXPECT_EQ(pick_byte(logits_of({{3, 1.0F}, {255, 2.0F}}), 0.0F, 0.5), 255);
  EXPECT_EQ(pick_byte(logits_of({{9, 2.0F}, {7, 2.0F}}), 0.0F, 0.99), 7);
}

TEST(PickByte, FollowsTheProbabilities) {
  const auto logits = logits_of({{10, 0.0F}, {20, std::log(2.0F)}, {30, 0.0F}});  // 1 : 2 : 1
  EXPECT_EQ(pick_byte(logits, 1.0F, 0.0), 10);
  EXPECT_EQ(pick_byte(logits, 1.0F, 0.249), 10);
  EXPECT_EQ(pick_byte(logits, 1.0F, 0.251), 20);
  EXPECT_EQ(pick_byte(logits, 1.0F, 0.749), 20);
  EXPECT_EQ(pick_byte(logits, 1.0F, 0.751), 30);
  EXPECT_EQ(pick_byte(logits, 1.0F, std::nextafter(1.0, 0.0)), 30);
  // At half the temperature 1 : 4 : 1.
  EXPECT_EQ(pick_byte(logits, 0.5F, 0.17), 20);
  EXPECT_EQ(pick_byte(logits, 0.5F, 0.16), 10);
  // Hot enough, all three alike.
  EXPECT_EQ(pick_byte(logits, 1e6F, 0.34), 20);
  EXPECT_EQ(pick_byte(logits, 1e6F, 0.33), 10);
}

TEST(PickByte, LargeLogitsDoNotOverflow) {
  EXPECT_EQ(pick_byte(logits_of({{1, 1e30F}}), 1e-30F, 0.5), 1);
}

std::string sampled(int ranks, const MeshConfig& mesh, std::string_view prompt,
                    const SampleOptions& options) {
  std::string text;
  run_ranks(ranks, [&](Communicator& world) {
    SmallRun run(world, with_mesh(small_config(), mesh));
    std::string heard;
    auto own = options;
    own.on_byte = [&](char byte) { heard += byte; };
    const auto result = sample(run.trainer.model(), prompt, own);
    EXPECT_EQ(heard, result);
    if (world.rank() == 0) text = result;
    world.barrier();
    EXPECT_EQ(result, text) << "rank " << world.rank();
    world.barrier();
  });
  return text;
}

TEST(Sample, IsTheSameAtEveryMesh) {
  const SampleOptions options{.bytes = 24, .temperature = 1.0F, .seed = 5};
  const auto alone = sampled(1, {}, "the", options);
  EXPECT_EQ(alone.size(), 24U);
  EXPECT_EQ(sampled(2, {}, "the", options), alone);
  EXPECT_EQ(sampled(4, {.dp = 2}, "the", options), alone);
  EXPECT_EQ(sampled(2, {.ep = 1, .sp = 2}, "the", options), alone);
  EXPECT_EQ(sampled(6, {.sp = 3, .expert_axes = {"ep", "sp"}}, "the", options), alone);
}

TEST(Sample, DependsOnSeedAndPrompt) {
  const SampleOptions options{.bytes = 24, .temperature = 1.0F, .seed = 5};
  const auto text = sampled(1, {}, "the", options);
  EXPECT_NE(sampled(1, {}, "the", {.bytes = 24, .temperature = 1.0F, .seed = 6}), text);
  EXPECT_NE(sampled(1, {}, "yard", options), text);
  EXPECT_EQ(sampled(1, {}, "", options), sampled(1, {}, "\n", options));
  EXPECT_EQ(sampled(1, {}, "the", {.bytes = 0}), "");
}

TEST(Sample, OnlyTheContextIsSeen) {
  const SampleOptions options{.bytes = 20, .temperature = 1.0F, .seed = 5};
  const std::string last(static_cast<std::size_t>(small_config().model.context), 'x');
  EXPECT_EQ(sampled(1, {}, "before" + last, options), sampled(1, {}, last, options));
}

// Each byte is the pick from the logits of all before it, computed here from the whole text.
TEST(Sample, EachByteIsPickedFromTheLogitsOfTheLast) {
  run_ranks(1, [&](Communicator& world) {
    SmallRun run(world, small_config());
    const std::string prompt = "the ";
    const auto text =
        prompt + sample(run.trainer.model(), prompt, {.bytes = 8, .temperature = 0.0F});
    const auto length = static_cast<std::int64_t>(text.size());
    TokenBatch batch{.shard = SequenceShard(1, length, 1, 0),
                     .tokens = {text.begin(), text.end()},
                     .targets = std::vector<std::uint8_t>(text.size()),
                     .total_tokens = length};
    const Tensor logits = run.trainer.model().logits(batch);
    for (std::int64_t i = static_cast<std::int64_t>(prompt.size()); i < length; ++i) {
      const auto row = logits.view().slice(i - 1, i);
      EXPECT_EQ(pick_byte(row.span<float>(), 0.0F, 0.0),
                static_cast<std::uint8_t>(text[static_cast<std::size_t>(i)]));
    }
  });
}

}  // namespace
}  // namespace switchyard::train::sampler_test
