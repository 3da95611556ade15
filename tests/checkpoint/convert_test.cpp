// SPDX-License-Identifier: Apache-2.0
// Checkpoints of other systems: what is viewed, and what is copied.
#include "switchyard/convert.h"

#include <gtest/gtest.h>

#include "support/checkpoint/checkpoints.h"

namespace switchyard::testing::convert_test {
namespace {

float element(const ConstTensorView& view, std::int64_t row, std::int64_t column = 0) {
  const auto* data = view.row(row) + column * size_of(view.dtype());
  return view.dtype() == Dtype::f32 ? *reinterpret_cast<const float*>(data)
                                    : to_float(*reinterpret_cast<const Bfloat16*>(data));
}

// Rows `first` … of expert `index` of a packed tensor, and not a copy of them.
void expect_view(const ConstTensorView& view, const ConstTensorView& packed, std::int64_t index,
                 std::int64_t first, const Shape& shape) {
  EXPECT_EQ(view.data(), packed.row(index) + first * shape[1] * size_of(packed.dtype()));
  EXPECT_EQ(view.shape(), shape);
  EXPECT_EQ(view.row_stride(), shape[1]);
  EXPECT_EQ(view.owner(), packed.owner());
}

// view[r][c] = packed[index][c][first + r · step]
void expect_transposed(const ConstTensorView& view, const ConstTensorView& packed,
                       std::int64_t index, std::int64_t first = 0, std::int64_t step = 1) {
  const auto width = packed.shape()[2];
  ASSERT_EQ(view.shape(), (Shape{width / step, packed.shape()[1]}));
  EXPECT_EQ(view.dtype(), packed.dtype());
  for (std::int64_t r = 0; r < view.shape()[0]; ++r) {
    for (std::int64_t c = 0; c < view.shape()[1]; ++c) {
      ASSERT_EQ(element(view, r, c), element(packed, index, c * width + first + r * step))
          << r << "," << c;
    }
  }
}

TEST(Convert, PackedHuggingFaceExpertsAreViews) {
  const std::vector<std::vector<int>> indices{{0, 3}, {}, {1, 2, 4}};
  const auto checkpoint = packed_hugging_face(5);
  for (int rank = 0; rank < 3; ++rank) {
    const auto weights = hugging_face(checkpoint, rank);
    EXPECT_EQ(weights.router.gate.data(), checkpoint.at("gate.weight").data());
    EXPECT_EQ(weights.router.gate_bias.data(), nullptr);
    EXPECT_EQ(weights.router.score_bias.data(), nullptr);
    EXPECT_EQ(weights.shared.up.data(), nullptr);
    const auto& mine = indices[static_cast<std::size_t>(rank)];
    ASSERT_EQ(weights.experts.size(), mine.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const auto& expert = weights.experts[i];
      const auto& gate_up = checkpoint.at("experts.gate_up_proj");
      expect_view(expert.gate, gate_up, mine[i], 0, {kInner, kHidden});
      expect_view(expert.up, gate_up, mine[i], kInner, {kInner, kHidden});
      expect_view(expert.down, checkpoint.at("experts.down_proj"), mine[i], 0, {kHidden, kInner});
    }
  }
}

TEST(Convert, PackedTensorsMayHoldTheRanksOwnExpertsOnly) {
  const auto checkpoint = packed_hugging_face(3);
  const auto weights = hugging_face(checkpoint, 2);
  ASSERT_EQ(weights.experts.size(), 3U);
  for (std::int64_t i = 0; i < 3; ++i) {
    expect_view(weights.experts[static_cast<std::size_t>(i)].up,
                checkpoint.at("experts.gate_up_proj"), i, kInner, {kInner, kHidden});
  }
  EXPECT_TRUE(hugging_face(packed_hugging_face(0), 1).experts.empty());
}

TEST(Convert, ASharedExpertIsFoundUnderEitherName) {
  for (const std::string stem : {"shared_expert.", "shared_experts."}) {
    for (auto checkpoint : {packed_hugging_face(5), gpt_oss(Dtype::f32)}) {
      checkpoint.add(stem + "gate_proj.weight", {3, kHidden})
          .add(stem + "up_proj.weight", {3, kHidden})
          .add(stem + "down_proj.weight", {kHidden, 3});
      const auto shared = hugging_face(checkpoint, 1).shared;
      EXPECT_EQ(shared.gate.data(), checkpoint.at(stem + "gate_proj.weight").data());
      EXPECT_EQ(shared.up.data(), checkpoint.at(stem + "up_proj.weight").data());
      EXPECT_EQ(shared.down.data(), checkpoint.at(stem + "down_proj.weight").data());
    }
  }
}

void expect_separate(const MoeWeights& weights, const Checkpoint& checkpoint,
                     const std::array<std::string, 3>& names) {
  ASSERT_EQ(weights.experts.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto stem = i == 0 ? std::string("experts.0.") : std::string("experts.3.");
    EXPECT_EQ(weights.experts[i].gate.data(), checkpoint.at(stem + names[0]).data());
    EXPECT_EQ(weights.experts[i].up.data(), checkpoint.at(stem + names[1]).data());
    EXPECT_EQ(weights.experts[i].down.data(), checkpoint.at(stem + names[2]).data());
  }
}

TEST(Convert, ExpertsWithTensorsOfTheirOwnAreViews) {
  for (const auto& names : {kProjectionNames, kMixtralNames}) {
    const auto checkpoint = separate("gate.weight", names);
    expect_separate(hugging_face(checkpoint, 0), checkpoint, names);
    EXPECT_TRUE(hugging_face(checkpoint, 1).experts.empty());
  }
  const auto checkpoint = separate("router.gate.weight", kProjectionNames);
  expect_separate(kempner_forge(checkpoint, 0), checkpoint, kProjectionNames);
  EXPECT_TRUE(kempner_forge(checkpoint, 1).experts.empty());
}

TEST(Convert, DeepSeekHasASharedExpertAndAScoreBias) {
  auto checkpoint = packed_hugging_face(5);
  checkpoint.add("gate.e_score_correction_bias", {5})
      .add("shared_experts.gate_proj.weight", {2 * kInner, kHidden})
      .add("shared_experts.up_proj.weight", {2 * kInner, kHidden})
      .add("shared_experts.down_proj.weight", {kHidden, 2 * kInner});
  const auto weights = hugging_face(checkpoint, 1);
  EXPECT_EQ(weights.router.score_bias.data(), checkpoint.at("gate.e_score_correction_bias").data());
  EXPECT_EQ(weights.shared.gate.data(), checkpoint.at("shared_experts.gate_proj.weight").data());
  EXPECT_EQ(weights.shared.up.data(), checkpoint.at("shared_experts.up_proj.weight").data());
  EXPECT_EQ(weights.shared.down.data(), checkpoint.at("shared_experts.down_proj.weight").data());
}

TEST(Convert, PackedBiasesLieAsTheirMatricesDo) {
  auto checkpoint = packed_hugging_face(5);
  checkpoint.add("gate.bias", {5})
      .add("experts.gate_up_proj_bias", {5, 2 * kInner})
      .add("experts.down_proj_bias", {5, kHidden});
  const auto weights = hugging_face(checkpoint, 0);
  EXPECT_EQ(weights.router.gate_bias.data(), checkpoint.at("gate.bias").data());
  ASSERT_EQ(weights.experts.size(), 2U);
  const auto& expert = weights.experts[1];
  const auto* bias = checkpoint.at("experts.gate_up_proj_bias").row(3);
  EXPECT_EQ(expert.gate_bias.data(), bias);
  EXPECT_EQ(expert.gate_bias.shape(), Shape{kInner});
  EXPECT_EQ(expert.up_bias.data(), bias + kInner * 4);
  EXPECT_EQ(expert.up_bias.shape(), Shape{kInner});
  EXPECT_EQ(expert.down_bias.data(), checkpoint.at("experts.down_proj_bias").row(3));
  EXPECT_EQ(expert.down_bias.shape(), Shape{kHidden});
}

TEST(Convert, PackedExpertsMayHaveNoGate) {
  Checkpoint checkpoint;
  checkpoint.add("gate.weight", {5, kHidden})
      .add("experts.up_proj", {5, kInner, kHidden})
      .add("experts.down_proj", {5, kHidden, kInner});
  const auto weights = hugging_face(checkpoint, 0);
  ASSERT_EQ(weights.experts.size(), 2U);
  EXPECT_EQ(weights.experts[1].gate.data(), nullptr);
  EXPECT_EQ(weights.experts[1].up_bias.data(), nullptr);
  expect_view(weights.experts[1].up, checkpoint.at("experts.up_proj"), 3, 0, {kInner, kHidden});
  expect_view(weights.experts[1].down, checkpoint.at("experts.down_proj"), 3, 0, {kHidden, kInner});

  checkpoint.add("experts.up_proj_bias", {5, kInner});
  const auto biased = hugging_face(checkpoint, 0).experts[1];
  EXPECT_EQ(biased.gate_bias.data(), nullptr);
  EXPECT_EQ(biased.up_bias.data(), checkpoint.at("experts.up_proj_bias").row(3));
  EXPECT_EQ(biased.down_bias.data(), nullptr);
}

TEST(Convert, ExpertsWithTensorsOfTheirOwnMayHaveBiasesAndNoGate) {
  auto checkpoint = separate("gate.weight", kProjectionNames);
  for (const std::string stem : {"experts.0.", "experts.3.", "shared_experts."}) {
    checkpoint.remove(stem + "gate_proj.weight")
        .add(stem + "up_proj.weight", {kInner, kHidden})
        .add(stem + "down_proj.weight", {kHidden, kInner})
        .add(stem + "up_proj.bias", {kInner})
        .add(stem + "down_proj.bias", {kHidden});
  }
  const auto weights = hugging_face(checkpoint, 0);
  ASSERT_EQ(weights.experts.size(), 2U);
  const auto expect = [&](const ExpertWeights& expert, const std::string& stem) {
    EXPECT_EQ(expert.gate.data(), nullptr);
    EXPECT_EQ(expert.gate_bias.data(), nullptr);
    EXPECT_EQ(expert.up.data(), checkpoint.at(stem + "up_proj.weight").data());
    EXPECT_EQ(expert.up_bias.data(), checkpoint.at(stem + "up_proj.bias").data());
    EXPECT_EQ(expert.down_bias.data(), checkpoint.at(stem + "down_proj.bias").data());
  };
  expect(weights.experts[1], "experts.3.");
  expect(weights.shared, "shared_experts.");
  checkpoint.add("experts.0.gate_proj.weight", {kInner, kHidden})
      .add("experts.3.gate_proj.weight", {kInner, kHidden})
      .add("experts.3.gate_proj.bias", {kInner});
  EXPECT_EQ(hugging_face(checkpoint, 0).experts[1].gate_bias.data(),
            checkpoint.at("experts.3.gate_proj.bias").data());
}

void expect_every_second(const ConstTensorView& view, const ConstTensorView& packed,
                         std::int64_t index, std::int64_t first) {
  ASSERT_EQ(view.shape(), (Shape{kInner}));
  for (std::int64_t i = 0; i < kInner; ++i) {
    ASSERT_EQ(element(view, i), element(packed, index, first + 2 * i)) << i;
  }
}

TEST(Convert, GptOssExpertsAreTakenApartAndTransposed) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const auto checkpoint = gpt_oss(dtype);
    const auto weights = hugging_face(checkpoint, 2);
    EXPECT_EQ(weights.router.gate.data(), checkpoint.at("router.weight").data());
    EXPECT_EQ(weights.router.gate_bias.data(), checkpoint.at("router.bias").data());
    ASSERT_EQ(weights.experts.size(), 3U);
    const std::array<std::int64_t, 3> ids{1, 2, 4};
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto& expert = weights.experts[i];
      expect_transposed(expert.gate, checkpoint.at("experts.gate_up_proj"), ids[i], 0, 2);
      expect_transposed(expert.up, checkpoint.at("experts.gate_up_proj"), ids[i], 1, 2);
      expect_transposed(expert.down, checkpoint.at("experts.down_proj"), ids[i]);
      const auto& bias = checkpoint.at("experts.gate_up_proj_bias");
      expect_every_second(expert.gate_bias, bias, ids[i], 0);
      expect_every_second(expert.up_bias, bias, ids[i], 1);
      EXPECT_EQ(expert.down_bias.data(), checkpoint.at("experts.down_proj_bias").row(ids[i]));
    }
  }
}

TEST(Convert, PackedKempnerForgeExpertsAreTransposed) {
  Checkpoint checkpoint;
  checkpoint.add("router.gate.weight", {5, kHidden})
      .add("router.expert_bias", {5})
      .add("up_w", {5, kHidden, kInner})
      .add("gate_w", {5, kHidden, kInner})
      .add("down_w", {5, kInner, kHidden})
      .add("shared_expert.gate_proj.weight", {kInner, kHidden})
      .add("shared_expert.up_proj.weight", {kInner, kHidden})
      .add("shared_expert.down_proj.weight", {kHidden, kInner});
  const auto weights = kempner_forge(checkpoint, 0);
  EXPECT_EQ(weights.router.gate.data(), checkpoint.at("router.gate.weight").data());
  EXPECT_EQ(weights.router.score_bias.data(), checkpoint.at("router.expert_bias").data());
  ASSERT_EQ(weights.experts.size(), 2U);
  expect_transposed(weights.experts[1].gate, checkpoint.at("gate_w"), 3);
  expect_transposed(weights.experts[1].up, checkpoint.at("up_w"), 3);
  expect_transposed(weights.experts[1].down, checkpoint.at("down_w"), 3);
  EXPECT_EQ(weights.shared.gate.data(), checkpoint.at("shared_expert.gate_proj.weight").data());

  checkpoint.remove("gate_w").remove("shared_expert.gate_proj.weight");
  const auto ungated = kempner_forge(checkpoint, 0);
  EXPECT_EQ(ungated.experts[1].gate.data(), nullptr);
  expect_transposed(ungated.experts[1].up, checkpoint.at("up_w"), 3);
  EXPECT_EQ(ungated.shared.gate.data(), nullptr);
  EXPECT_EQ(ungated.shared.up.data(), checkpoint.at("shared_expert.up_proj.weight").data());
}

}  // namespace
}  // namespace switchyard::testing::convert_test
