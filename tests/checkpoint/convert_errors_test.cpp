// SPDX-License-Identifier: Apache-2.0
// Checkpoints that do not have what a block needs.
#include <gtest/gtest.h>

#include "support/checkpoint/checkpoints.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::testing::convert_errors_test {
namespace {

TEST(ConvertErrors, AMissingTensorIsNamed) {
  const auto hugging_face_error = [](const Checkpoint& checkpoint) {
    return error_of<InvalidArgument>([&] { hugging_face(checkpoint, 2); });
  };
  EXPECT_EQ(hugging_face_error({}), "there is no tensor mlp.gate.weight or mlp.router.weight");
  EXPECT_EQ(hugging_face_error(packed_hugging_face(5).remove("experts.down_proj")),
            "there is no tensor mlp.experts.down_proj");
  EXPECT_EQ(hugging_face_error(packed_hugging_face(5).remove("experts.gate_up_proj")),
            "there is no tensor mlp.experts.gate_up_proj or mlp.experts.up_proj or "
            "mlp.experts.1.up_proj.weight or mlp.experts.1.w3.weight");
  EXPECT_EQ(hugging_face_error(gpt_oss(Dtype::f32).remove("router.bias")),
            "there is no tensor mlp.router.bias");
  const auto kempner_forge_error = [](const Checkpoint& checkpoint) {
    return error_of<InvalidArgument>([&] { kempner_forge(checkpoint, 2); });
  };
  EXPECT_EQ(kempner_forge_error({}), "there is no tensor mlp.router.gate.weight");
  EXPECT_EQ(kempner_forge_error(separate("router.gate.weight", kProjectionNames)),
            "there is no tensor mlp.up_w or mlp.experts.1.up_proj.weight");
}

TEST(ConvertErrors, WrongExtentsAreNamed) {
  const auto error = [](const Checkpoint& checkpoint) {
    return error_of<InvalidArgument>([&] { hugging_face(checkpoint, 2); });
  };
  EXPECT_EQ(
      error(packed_hugging_face(4)),
      "mlp.experts.gate_up_proj is f32 [4,82,37], but must hold [82,37] of f32, bf16 or f16 for "
      "each of all 5 experts, or of this rank's 3");
  EXPECT_EQ(
      error(packed_hugging_face(5).add("experts.down_proj", {5, kHidden, kInner + 1})),
      "mlp.experts.down_proj is f32 [5,37,42], but must hold [37,41] of f32, bf16 or f16 for each "
      "of all 5 experts, or of this rank's 3");
  EXPECT_EQ(error(packed_hugging_face(5).add("experts.gate_up_proj", {5, 2 * kInner})),
            "mlp.experts.gate_up_proj is [5,82], but must have 3 extents");
  EXPECT_EQ(error(packed_hugging_face(5).add("gate.weight", {6, kHidden})),
            "mlp.gate.weight is f32 [6,37], but must be [5,37] of f32, bf16 or f16");
  EXPECT_EQ(error_of<InvalidArgument>([] { hugging_face(packed_hugging_face(5), 3); }),
            "rank (3) must be 0 to 2");
}

TEST(ConvertErrors, AGateThatOneExpertLacksIsNamed) {
  const auto error = [](const Checkpoint& checkpoint) {
    return error_of<InvalidArgument>([&] { hugging_face(checkpoint, 0); });
  };
  const auto whole = separate("gate.weight", kProjectionNames);
  EXPECT_EQ(error(Checkpoint(whole).remove("experts.3.gate_proj.weight")),
            "mlp.experts.3 has no gate, but expert 0 has one");
  EXPECT_EQ(error(Checkpoint(whole).remove("experts.0.gate_proj.weight")),
            "mlp.experts.3 has a gate, but expert 0 has none");
}

TEST(ConvertErrors, ABiasOfTheWrongSizeIsNamed) {
  const auto error = [](const Checkpoint& checkpoint) {
    return error_of<InvalidArgument>([&] { hugging_face(checkpoint, 0); });
  };
  EXPECT_EQ(error(packed_hugging_face(5).add("gate.bias", {4})),
            "mlp.gate.bias is f32 [4], but must be [5] of f32, bf16 or f16");
  EXPECT_EQ(
      error(packed_hugging_face(5).add("experts.gate_up_proj_bias", {5, kInner})),
      "mlp.experts.gate_up_proj_bias is f32 [5,41], but must hold [82] of f32, bf16 or f16 for "
      "each of all 5 experts, or of this rank's 2");
  EXPECT_EQ(error(separate("gate.weight", kProjectionNames).add("experts.3.up_proj.bias", {40})),
            "mlp.experts.3.up_proj.bias is f32 [40], but must be [41] of f32, bf16 or f16");
}

TEST(ConvertErrors, ASharedExpertWithAGateIsRefused) {
  const auto qwen2 = packed_hugging_face(5).add("shared_expert_gate.weight", {1, kHidden});
  EXPECT_EQ(error_of<Unsupported>([&] { hugging_face(qwen2, 2); }),
            "mlp.shared_expert_gate.weight: a shared expert with a gate of its own (Qwen2-MoE) is "
            "not supported");
}

TEST(ConvertErrors, TwoSharedExpertsAreRefused) {
  const auto both = packed_hugging_face(5)
                        .add("shared_expert.up_proj.weight", {3, kHidden})
                        .add("shared_experts.up_proj.weight", {3, kHidden});
  EXPECT_EQ(error_of<InvalidArgument>([&] { hugging_face(both, 2); }),
            "there are mlp.shared_expert.up_proj.weight and mlp.shared_experts.up_proj.weight: "
            "which is the shared expert?");
}

}  // namespace
}  // namespace switchyard::testing::convert_errors_test
