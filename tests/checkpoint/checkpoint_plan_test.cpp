// SPDX-License-Identifier: Apache-2.0
// Who writes what, and what ranks must agree on.
#include "checkpoint/checkpoint_plan.h"

#include <gtest/gtest.h>

#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::checkpoint_plan_test {
namespace {

using testing::error_of;
using Records = std::vector<CheckpointRecord>;

constexpr std::int64_t kHidden = 6;
constexpr std::int64_t kInner = 4;

BlockRecord block_of(int num_experts, const std::vector<std::int32_t>& ids) {
  BlockRecord block{num_experts, ids, {}};
  block.forms[kGate] = {Dtype::f32, {kInner, kHidden}};
  block.forms[kUp] = {Dtype::f32, {kInner, kHidden}};
  block.forms[kDown] = {Dtype::f32, {kHidden, kInner}};
  return block;
}

// A rank for each list of experts.
Records records_of(const std::vector<std::vector<std::int32_t>>& ids,
                   CheckpointForm form = CheckpointForm::one_file) {
  Records records;
  for (const auto& own : ids) {
    CheckpointRecord record{"x", form, {}, {}, {}, {}};
    record.tensors["norm"] = {Dtype::f32, {kHidden}};
    record.blocks["mlp."] = block_of(3, own);
    records.push_back(record);
  }
  return records;
}

std::string error(const Records& records) {
  return error_of<InvalidArgument>([&] { plan_checkpoint(records); });
}

TEST(CheckpointPlan, TheLowestRankThatHoldsSomethingWritesIt) {
  const auto plan = plan_checkpoint(records_of({{1}, {0, 1}, {2}, {2}}));
  EXPECT_EQ(plan.tensors.at("norm").rank, 0);
  EXPECT_EQ(plan.owners.at("mlp."), (std::vector<int>{1, 0, 2}));
  EXPECT_EQ(plan.tensors.size(), 3U);
  EXPECT_EQ(plan.tensors.at("mlp.experts.gate_up_proj").form,
            (TensorForm{Dtype::f32, {3, 2 * kInner, kHidden}}));
  const auto by_id = plan_checkpoint(records_of({{1}, {0, 1}, {2}}, CheckpointForm::file_per_rank));
  EXPECT_EQ(by_id.tensors.size(), 1U + 3U * 3U);
  EXPECT_EQ(by_id.tensors.at("mlp.experts.0.up_proj.weight").rank, 1);
  EXPECT_EQ(by_id.tensors.at("mlp.experts.1.up_proj.weight").rank, 0);
}

TEST(CheckpointPlan, PlacesOfPackedExperts) {
  auto block = block_of(3, {0});
  block.forms[kGateBias] = block.forms[kUpBias] = {Dtype::bf16, {kInner}};
  block.forms[kDownBias] = {Dtype::f32, {kHidden}};
  const auto expect = [&](std::size_t tensor, const std::string& name, const Shape& shape,
                          std::int64_t first) {
    const auto place = place_of("mlp.", block, 2, tensor, CheckpointForm::one_file);
    EXPECT_EQ(place.name, "mlp.experts." + name);
    EXPECT_EQ(place.whole, (TensorForm{block.forms[tensor]->dtype, shape})) << name;
    EXPECT_EQ(place.first, first) << name;
  };
  const auto matrix = kInner * kHidden * 4;
  expect(kGate, "gate_up_proj", {3, 2 * kInner, kHidden}, 4 * matrix);
  expect(kUp, "gate_up_proj", {3, 2 * kInner, kHidden}, 5 * matrix);
  expect(kDown, "down_proj", {3, kHidden, kInner}, 2 * matrix);
  expect(kGateBias, "gate_up_proj_bias", {3, 2 * kInner}, 4 * kInner * 2);
  expect(kUpBias, "gate_up_proj_bias", {3, 2 * kInner}, 5 * kInner * 2);
  expect(kDownBias, "down_proj_bias", {3, kHidden}, 2 * kHidden * 4);
  block.forms[kGate] = block.forms[kGateBias] = std::nullopt;
  expect(kUp, "up_proj", {3, kInner, kHidden}, 2 * matrix);
  expect(kUpBias, "up_proj_bias", {3, kInner}, 2 * kInner * 2);
}

TEST(CheckpointPlan, RanksMustMakeTheSameCall) {
  auto records = records_of({{0}, {1, 2}});
  records[1].path = "y";
  EXPECT_EQ(error(records), "path is 'x' on rank 0, but 'y' on rank 1");
  records = records_of({{0}, {1, 2}});
  records[1].form = CheckpointForm::file_per_rank;
  EXPECT_EQ(error(records), "form is one_file on rank 0, but file_per_rank on rank 1");
}

TEST(CheckpointPlan, RanksMustAgreeOnForms) {
  auto records = records_of({{0}, {1}, {2}});
  records[2].tensors["norm"] = {Dtype::bf16, {kHidden}};
  EXPECT_EQ(error(records), "tensor 'norm' is f32 [6] on rank 0, but bf16 [6] on rank 2");
  records = records_of({{0}, {1}, {2}});
  records[2].blocks["mlp."].num_experts = 4;
  EXPECT_EQ(error(records), "block 'mlp.' has 3 experts on rank 0, but 4 on rank 2");
  records = records_of({{}, {0, 1}, {2}});
  records[2].blocks["mlp."].forms[kDown] = {Dtype::f32, {kHidden, 5}};
  EXPECT_EQ(error(records),
            "mlp.experts.2.down_proj.weight is f32 [6,5] on rank 2, but experts have f32 [6,4] on "
            "rank 1");
  records = records_of({{}, {0, 1}, {2}});
  records[2].blocks["mlp."].forms[kDownBias] = {Dtype::f32, {kHidden}};
  EXPECT_EQ(error(records),
            "mlp.experts.2.down_proj.bias is f32 [6] on rank 2, but experts have none on rank 1");
  records = records_of({{}, {0, 1}, {2}});
  records[2].blocks["mlp."].forms[kGate] = std::nullopt;
  EXPECT_EQ(error(records),
            "mlp.experts.2.gate_proj.weight is missing on rank 2, but experts have f32 [4,6] on "
            "rank 1");
}

TEST(CheckpointPlan, EveryExpertMustBeThere) {
  EXPECT_EQ(error(records_of({{2}, {0}})),
            "no rank holds expert 1 of the 3 of block 'mlp.'; ranks with others: 0, 1");
  EXPECT_EQ(error(records_of({{}, {}}, CheckpointForm::file_per_rank)),
            "no rank holds experts 0, 1, 2 of the 3 of block 'mlp.'; ranks with others: none");
}

TEST(CheckpointPlan, NamesMustNotMeanTwoThings) {
  for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
    for (const std::string part :
         {"experts.", "router.", "gate.", "shared_experts.", "shared_expert_gate."}) {
      auto records = records_of({{0, 1}, {2}}, form);
      const auto name = "mlp." + part + "x";
      records[1].tensors[name] = {Dtype::f32, {1}};
      EXPECT_EQ(error(records), "tensor '" + name + "' is given by rank 1, but names that begin " +
                                    "with 'mlp." + part + "' belong to block 'mlp.'");
      records[1].of_blocks.insert(name);
      EXPECT_EQ(error(records), "no error");
    }
  }
}

}  // namespace
}  // namespace switchyard::checkpoint_plan_test
