// SPDX-License-Identifier: Apache-2.0
// Plans in the caller's memory on every device: what a dispatcher of one rank makes and moves.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/wide_ids.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/local_plan.h"

namespace switchyard::local_plan_contract_test {
namespace {

using testing::error_of;
using testing::Random;
using testing::same_bits;
using testing::wide_ids;

constexpr std::int64_t kHidden = 24;

class LocalPlanContract : public testing::OnDevices {
 protected:
  // The plan's memory, and the plan in it.
  struct Made {
    Tensor memory;
    LocalPlan plan;
  };
  Made make(const LocalPlanOptions& options, const Tensor& ids) const {
    Tensor memory = put(testing::poisoned({options.num_words()}, Dtype::i32));
    const LocalPlan plan(device, options, memory);
    const Tensor there = put(ids);
    plan.make(there);
    return {std::move(memory), plan};
  }
  Tensor rows(std::int64_t count) const {
    return put(testing::poisoned({count, kHidden}, Dtype::f32));
  }
  void expect_moved_alike(const Made& made, Dispatcher& dispatcher, const Plan& plan);
};
SWITCHYARD_ON_DEVICES(LocalPlanContract);

LocalPlanOptions options_for(const Tensor& ids, int num_experts, std::int64_t alignment = 1) {
  return {.num_tokens = ids.rows(),
          .top_k = ids.shape()[1],
          .num_experts = num_experts,
          .alignment = alignment};
}

PlanOptions plan_options(std::int64_t alignment) {
  return {.hidden = kHidden, .alignment = alignment};
}

// All four movements, with rows that are as many as the plan needs.
void LocalPlanContract::expect_moved_alike(const Made& made, Dispatcher& dispatcher,
                                           const Plan& plan) {
  const LocalPlanOptions& options = made.plan.options();
  Random random(3);
  const Shape tokens{options.num_tokens, kHidden};
  const Shape picks{options.num_tokens, options.top_k};
  const Tensor x = put(random.tensor(tokens, Dtype::f32));
  const Tensor weights = put(random.tensor(picks, Dtype::f32));
  const std::int64_t num_rows = made.plan.num_rows();
  ASSERT_EQ(num_rows, plan.num_rows());

  Tensor sent = rows(num_rows);
  Tensor row_weights = device.empty({num_rows}, Dtype::f32);
  made.plan.dispatch({.x = x, .weights = weights}, {.rows = sent, .row_weights = row_weights});
  Tensor expected_sent = rows(num_rows);
  Tensor expected_row_weights = device.empty({num_rows}, Dtype::f32);
  dispatcher.dispatch(plan, {.x = x, .weights = weights},
                      {.rows = expected_sent, .row_weights = expected_row_weights});
  EXPECT_TRUE(same_bits(get(sent), get(expected_sent)));
  EXPECT_TRUE(same_bits(get(row_weights), get(expected_row_weights)));

  Tensor y = device.empty(tokens, Dtype::f32);
  made.plan.combine({.rows = sent, .weights = weights}, y);
  EXPECT_TRUE(same_bits(get(y), get(dispatcher.combine(plan, sent, weights))));

  Tensor d_rows = rows(num_rows);
  Tensor d_weights = device.empty(picks, Dtype::f32);
  Tensor expected_d_rows = rows(num_rows);
  Tensor expected_d_weights = device.empty(picks, Dtype::f32);
  const CombineBackwardInput in{.d_y = x, .weights = weights, .rows = sent};
  made.plan.combine_backward(in, {.d_rows = d_rows, .d_weights = d_weights});
  dispatcher.combine_backward(plan, in,
                              {.d_rows = expected_d_rows, .d_weights = expected_d_weights});
  EXPECT_TRUE(same_bits(get(d_rows), get(expected_d_rows)));
  EXPECT_TRUE(same_bits(get(d_weights), get(expected_d_weights)));

  Tensor d_x = device.empty(tokens, Dtype::f32);
  Tensor expected_d_x = device.empty(tokens, Dtype::f32);
  const DispatchBackwardInput back{.d_rows = d_rows, .d_row_weights = row_weights};
  made.plan.dispatch_backward(back, {.d_x = d_x, .d_weights = d_weights});
  dispatcher.dispatch_backward(plan, back, {.d_x = expected_d_x, .d_weights = expected_d_weights});
  EXPECT_TRUE(same_bits(get(d_x), get(expected_d_x)));
  EXPECT_TRUE(same_bits(get(d_weights), get(expected_d_weights)));
}

TEST_P(LocalPlanContract, EqualsADispatcherOfOneRank) {
  const auto comm = connect();
  for (const int num_experts : {1, 7, 128}) {
    for (const std::int64_t num_tokens : {0, 1, 37, 500}) {
      for (const std::int64_t alignment : {1, 16}) {
        SCOPED_TRACE(::testing::Message()
                     << num_tokens << " tokens, E " << num_experts << ", " << alignment);
        const Tensor ids = Random(5).expert_ids({.num_tokens = num_tokens,
                                                 .top_k = num_experts == 1 ? 1 : 3,
                                                 .num_experts = num_experts,
                                                 .none = 0.1});
        const Made made = make(options_for(ids, num_experts, alignment), ids);
        Dispatcher dispatcher(*comm, ExpertPlacement::contiguous(num_experts, 1),
                              {.plan = plan_options(alignment)}, device);
        const Tensor there = put(ids);
        const Plan plan = dispatcher.plan(there);
        EXPECT_TRUE(same_bits(get(made.plan.slots()), get(plan.slots())));
        const RowGroups groups = made.plan.groups();
        EXPECT_TRUE(same_bits(get(groups.row_offsets), get(plan.row_offsets())));
        EXPECT_TRUE(same_bits(get(groups.group_rows), get(plan.group_rows())));
        EXPECT_LE(made.plan.num_rows(), made.plan.options().most_rows());
        expect_moved_alike(made, dispatcher, plan);
      }
    }
  }
}

// Whoever has the options and the words has the plan.
TEST_P(LocalPlanContract, ACopyOfItsMemoryIsThePlan) {
  const Tensor ids = Random(5).expert_ids({.num_tokens = 50, .top_k = 2, .num_experts = 9});
  const auto options = options_for(ids, 9, 8);
  const Made made = make(options, ids);
  Tensor copied = device.copy_of(made.memory);
  const LocalPlan copy(device, options, copied);
  EXPECT_EQ(copy.num_rows(), made.plan.num_rows());
  EXPECT_TRUE(same_bits(get(copy.row_sources()), get(made.plan.row_sources())));
  EXPECT_NE(copy.slots().data(), made.plan.slots().data());
}

TEST_P(LocalPlanContract, IdsMayBeWideAndHaveSentinels) {
  const Tensor ids =
      Random(5).expert_ids({.num_tokens = 60, .top_k = 3, .num_experts = 8, .none = 0.3});
  auto options = options_for(ids, 8);
  const Made expected = make(options, ids);
  options.sentinel_ids = SentinelIds::allow;
  const Made made = make(options, wide_ids(ids, 8));
  made.plan.check();
  EXPECT_TRUE(same_bits(get(made.plan.slots()), get(expected.plan.slots())));
}

TEST_P(LocalPlanContract, BadIdsAreNamed) {
  const Tensor ids = Tensor::from<std::int32_t>({2, 2}, {0, 1, 2, 9});
  constexpr const char* kWords = "expert_ids[1,1] is 9, which is neither -1 nor an expert of 4";
  const auto check = [&] { make(options_for(ids, 4), ids).plan.check(); };
  const auto message = error_of<InvalidArgument>(check);
  EXPECT_NE(message.find(kWords), std::string::npos) << message;
}

TEST_P(LocalPlanContract, TensorsThatDoNotFitAreNamed) {
  const Tensor ids = Random(5).expert_ids({.num_tokens = 6, .top_k = 2, .num_experts = 3});
  const auto options = options_for(ids, 3);
  Tensor small = device.empty({5}, Dtype::i32);
  EXPECT_NE(error_of<InvalidArgument>([&] {
              LocalPlan(device, options, small);
            }).find("the plan's tensor is i32 [5], but must be i32 ["),
            std::string::npos);
  const Made made = make(options, ids);
  const Tensor x = put(Tensor::zeros({5, kHidden}, Dtype::f32));
  Tensor to = rows(12);
  EXPECT_EQ(error_of<InvalidArgument>([&] { made.plan.dispatch({.x = x}, {.rows = to}); }),
            "x is f32 [5,24], but the plan has tokens f32 [6,24]");
  auto huge = options;
  huge.num_tokens = std::int64_t{1} << 31;
  EXPECT_EQ(error_of<InvalidArgument>([&] { huge.num_words(); }),
            "2147483648 tokens with 2 picks each, aligned to 1, need more than 2^31 rows");
}

}  // namespace
}  // namespace switchyard::local_plan_contract_test
