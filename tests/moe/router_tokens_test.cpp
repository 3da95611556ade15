// SPDX-License-Identifier: Apache-2.0
// A router's promises about single tokens: ties, values that are not finite, and bits that depend
// only on the token.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "support/compare.h"
#include "support/random.h"
#include "switchyard/router.h"

namespace switchyard::router_tokens_test {
namespace {

using testing::Random;
using testing::same_bits;

constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr auto kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::int32_t> picks_of(const Routing& routing, std::int64_t token) {
  const auto row = routing.expert_ids.view().slice(token, token + 1).span<std::int32_t>();
  return {row.begin(), row.end()};
}

// Experts with the same gate row have the same logit, to the bit, wherever they stand; but oneDNN
// for AVX2 computes those beyond the last multiple of 16, if there are any before it, another way.
TEST(RouterTies, GoToTheLowerExpert) {
  for (const std::int64_t hidden : {17, 64, 100}) {
    for (const std::int32_t num_experts : {5, 16, 48, 64}) {
      const Tensor row = Random(1).tensor({1, hidden}, Dtype::f32);
      Tensor gate({num_experts, hidden}, Dtype::f32);
      for (std::int64_t e = 0; e < num_experts; ++e) {
        std::memcpy(gate.view().row(e), row.data(), static_cast<std::size_t>(row.bytes()));
      }
      const Tensor x = Random(2).tensor({70, hidden}, Dtype::f32);
      for (const auto& options :
           {RouterOptions::mixtral(num_experts, 3), RouterOptions::torchtitan(num_experts, 3)}) {
        const Routing routing = Router(options).route({.gate = gate}, x);
        for (std::int64_t t = 0; t < 70; ++t) {
          ASSERT_EQ(picks_of(routing, t), (std::vector<std::int32_t>{0, 1, 2}))
              << hidden << " x " << num_experts << ", token " << t;
        }
      }
    }
  }
}

TEST(RouterTies, OfGroupsGoToTheLowerGroup) {
  const Tensor gate = Tensor::zeros({16, 4}, Dtype::f32);
  const Tensor x = Random(2).tensor({3, 4}, Dtype::f32);
  const Routing routing = Router(RouterOptions::deepseek_v3(16, 4)).route({.gate = gate}, x);
  EXPECT_EQ(picks_of(routing, 2), (std::vector<std::int32_t>{0, 1, 2, 3}));

  // The bias makes groups 1 and 3 of four equal and best, and their second experts the better.
  auto options = RouterOptions::torchtitan(8, 2);
  options.num_expert_groups = 4;
  const Tensor bias = Tensor::from<float>({8}, {0, 0, 1, 2, 0, 0, 1, 2});
  const Routing biased =
      Router(options).route({.gate = Tensor::zeros({8, 4}, Dtype::f32), .score_bias = bias}, x);
  EXPECT_EQ(picks_of(biased, 0), (std::vector<std::int32_t>{3, 2}));
}

// Groups are compared by their two best, not by their best.
TEST(RouterGroups, AreComparedByTheirTwoBest) {
  auto options = RouterOptions::torchtitan(6, 1);
  options.num_expert_groups = 2;
  const Tensor bias = Tensor::from<float>({6}, {4, 0, 0, 3, 2, 0});
  const Tensor x = Tensor::zeros({1, 4}, Dtype::f32);
  const Routing routing =
      Router(options).route({.gate = Tensor::zeros({6, 4}, Dtype::f32), .score_bias = bias}, x);
  EXPECT_EQ(picks_of(routing, 0), std::vector<std::int32_t>{3});
  EXPECT_EQ(routing.weights.span<float>()[0], 0.5F);  // the bias is no part of the weight
}

TEST(RouterNonFinite, TokensHaveNoPicksAndHurtNoOthers) {
  const auto options = RouterOptions::mixtral(6, 2);
  for (const float bad : {kNaN, kInfinity, -kInfinity, 3e38F}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const int num_threads : {1, 3}) {
        Tensor x = Random(4).tensor({150, 20}, dtype);
        const Tensor gate = Random(5).tensor({6, 20}, dtype);
        const Router router(options, Device::cpu({.num_threads = num_threads}));
        const Routing clean = router.route({.gate = gate}, x);
        for (const std::int64_t token : {149, 70, 71}) {
          for (std::int64_t i = 3; i < 20; ++i) {  // 3e38 overflows as these add up
            const auto at = static_cast<std::size_t>(token * 20 + i);
            if (dtype == Dtype::f32) x.span<float>()[at] = bad;
            if (dtype == Dtype::bf16) x.span<Bfloat16>()[at] = to_bfloat16(bad);
          }
        }
        const Routing routing = router.route({.gate = gate}, x);
        EXPECT_EQ(routing.first_non_finite_token, 70);
        for (std::int64_t t = 0; t < 150; ++t) {
          const bool is_bad = t == 149 || t == 70 || t == 71;
          const auto weights = routing.weights.view().slice(t, t + 1);
          if (is_bad) {
            EXPECT_EQ(picks_of(routing, t), (std::vector<std::int32_t>{-1, -1}));
            EXPECT_TRUE(same_bits(weights, Tensor::zeros({1, 2}, Dtype::f32)));
          } else {
            ASSERT_EQ(picks_of(routing, t), picks_of(clean, t));
            ASSERT_TRUE(same_bits(weights, clean.weights.view().slice(t, t + 1)));
          }
        }
      }
    }
  }
}

// A given choice does not help a token whose weights cannot be computed.
TEST(RouterNonFinite, ReplayedTokensLoseTheirPicksToo) {
  Tensor x = Random(4).tensor({3, 8}, Dtype::f32);
  x.span<float>()[8] = kNaN;
  const Tensor ids = Tensor::from<std::int32_t>({3, 1}, {2, 1, 0});
  const Tensor gate = Random(5).tensor({4, 8}, Dtype::f32);
  const Routing routing = Router(RouterOptions::olmoe(4, 1)).replay({.gate = gate}, x, ids);
  EXPECT_EQ(routing.first_non_finite_token, 1);
  EXPECT_TRUE(same_bits(routing.expert_ids, Tensor::from<std::int32_t>({3, 1}, {2, -1, 0})));
}

std::vector<std::int64_t> problems_of(const Routing& routing) {
  const auto words = routing.problems.span<std::int64_t>();
  return {words.begin(), words.end()};
}

TEST(RouterProblems, AreTheFirstTokenThatIsNotFiniteAndTheFirstBadId) {
  const Router router(RouterOptions::mixtral(4, 2), Device::cpu({.num_threads = 3}));
  const Tensor gate = Random(5).tensor({4, 8}, Dtype::f32);
  Tensor x = Random(4).tensor({150, 8}, Dtype::f32);
  const auto route = [&](const ConstTensorView& ids, BadIds bad_ids) {
    return router.route({.gate = gate}, {.x = x, .expert_ids = ids, .bad_ids = bad_ids});
  };
  Tensor ids({150, 2}, Dtype::i32);
  for (std::size_t i = 0; i < 300; ++i) {
    ids.span<std::int32_t>()[i] = i % 3 == 0 ? -1 : static_cast<std::int32_t>(i % 2);
  }
  const std::vector<std::int64_t> none{-1, -1, 0, 0, 0};
  EXPECT_EQ(problems_of(route(ids, BadIds::become_none)), none);
  Tensor clean = ids.clone();
  for (const std::size_t i : {71U, 140U, 141U, 299U}) clean.span<std::int32_t>()[i] = -1;
  ids.span<std::int32_t>()[70] = 1;
  clean.span<std::int32_t>()[70] = 1;
  ids.span<std::int32_t>()[71] = 1;  // once more
  ids.span<std::int32_t>()[140] = 4;
  ids.span<std::int32_t>()[141] = -2;
  ids.span<std::int32_t>()[299] = 100;
  const Routing cleaned = route(ids, BadIds::become_none);
  EXPECT_EQ(problems_of(cleaned), (std::vector<std::int64_t>{-1, 35, 1, 1, 1}));
  EXPECT_TRUE(same_bits(cleaned.expert_ids, clean));
  EXPECT_TRUE(same_bits(cleaned.weights, route(clean, BadIds::stay).weights));
  const Routing left = route(ids, BadIds::stay);
  EXPECT_EQ(problems_of(left), none);
  EXPECT_TRUE(same_bits(left.expert_ids, ids));
  for (const std::size_t token : {35U, 120U}) x.span<float>()[token * 8] = kNaN;
  EXPECT_EQ(problems_of(route(ids, BadIds::become_none)),
            (std::vector<std::int64_t>{35, 70, 0, 4, 0}));
}

struct Step {
  Routing routing;
  Tensor d_x, d_gate;
};

Step run_step(const RouterOptions& options, const Device& device, const ConstTensorView& gate,
              const ConstTensorView& x, const ConstTensorView& d_weights) {
  const Router router(options, device);
  Step step{router.route({.gate = gate}, x), Tensor::zeros(x.shape(), x.dtype()),
            Tensor(gate.shape(), Dtype::f32)};
  router.backward({.gate = gate},
                  {.x = x, .expert_ids = step.routing.expert_ids, .d_weights = d_weights},
                  {.d_x = step.d_x, .gradients = {.gate = step.d_gate}});
  return step;
}

// More tokens than are multiplied at once.
TEST(RouterGradients, OfManyTokensAddUp) {
  const auto options = RouterOptions::olmoe(4, 2);
  const Tensor gate = Random(7).tensor({4, 6}, Dtype::f32);
  const Tensor x = Random(8).tensor({2100, 6}, Dtype::f32);
  const Tensor d_weights = Random(9).tensor({2100, 2}, Dtype::f32);
  const auto part = [&](std::int64_t first, std::int64_t last) {
    return run_step(options, {}, gate, x.view().slice(first, last),
                    d_weights.view().slice(first, last));
  };
  const Step whole = part(0, 2100);
  Step sum = part(0, 700);
  const auto values = sum.d_gate.span<float>();
  for (const std::int64_t first : {700, 1400}) {
    const Step more = part(first, first + 700);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += more.d_gate.span<float>()[i];
  }
  EXPECT_TRUE(testing::near(whole.d_gate, sum.d_gate, 1e-5));
}

struct Sizes {
  std::int64_t hidden;
  int num_experts;
  Dtype dtype = Dtype::f32;
};
void PrintTo(const Sizes& s, std::ostream* out) { *out << s.hidden << " x " << s.num_experts; }

class RouterBitsTest : public ::testing::TestWithParam<Sizes> {
 protected:
  RouterBitsTest()
      : options_(RouterOptions::mixtral(GetParam().num_experts, 3)),
        gate_(Random(7).tensor({GetParam().num_experts, GetParam().hidden}, GetParam().dtype)),
        x_(Random(8).tensor({200, GetParam().hidden}, GetParam().dtype)),
        d_weights_(Random(9).tensor({200, 3}, Dtype::f32)),
        whole_(run_step(options_, {}, gate_, x_, d_weights_)) {}

  RouterOptions options_;
  Tensor gate_, x_, d_weights_;
  Step whole_;
};

TEST_P(RouterBitsTest, DependOnTheTokenAlone) {
  for (const std::int64_t num_tokens : {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,
                                        14, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 130}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{7}, 200 - num_tokens}) {
      const auto last = first + num_tokens;
      const Step part = run_step(options_, {}, gate_, x_.view().slice(first, last),
                                 d_weights_.view().slice(first, last));
      const auto slice = [&](const Tensor& of_all) { return of_all.view().slice(first, last); };
      ASSERT_TRUE(same_bits(part.routing.expert_ids, slice(whole_.routing.expert_ids)));
      ASSERT_TRUE(same_bits(part.routing.weights, slice(whole_.routing.weights)))
          << num_tokens << " tokens from " << first;
      ASSERT_TRUE(same_bits(part.d_x, slice(whole_.d_x))) << num_tokens << " tokens from " << first;
    }
  }
}

TEST_P(RouterBitsTest, DoNotDependOnThreads) {
  for (const int num_threads : {2, 4}) {
    const Step step =
        run_step(options_, Device::cpu({.num_threads = num_threads}), gate_, x_, d_weights_);
    EXPECT_TRUE(same_bits(step.routing.expert_ids, whole_.routing.expert_ids));
    EXPECT_TRUE(same_bits(step.routing.weights, whole_.routing.weights));
    EXPECT_TRUE(same_bits(step.d_x, whole_.d_x));
    EXPECT_TRUE(same_bits(step.d_gate, whole_.d_gate));
  }
}

// Rows of wider tensors, where they lie.
TEST_P(RouterBitsTest, DoNotDependOnStrides) {
  const auto spread = [](const Tensor& rows) {
    const auto width = rows.shape()[1];
    Tensor wide({rows.rows(), width + 5}, rows.dtype());
    testing::poison(wide);
    const TensorView view(wide.data(), rows.dtype(), rows.shape(), width + 5, wide.view().owner());
    for (std::int64_t r = 0; r < rows.rows(); ++r) {
      std::memcpy(view.row(r), rows.view().row(r), static_cast<std::size_t>(view.row_bytes()));
    }
    return view;
  };
  const Step step = run_step(options_, {}, spread(gate_), spread(x_), spread(d_weights_));
  EXPECT_TRUE(same_bits(step.routing.weights, whole_.routing.weights));
  EXPECT_TRUE(same_bits(step.d_x, whole_.d_x));
}

INSTANTIATE_TEST_SUITE_P(Sizes, RouterBitsTest,
                         ::testing::Values(Sizes{17, 5}, Sizes{512, 64}, Sizes{100, 128},
                                           Sizes{2048, 8}, Sizes{640, 256},
                                           Sizes{33, 40, Dtype::bf16}));

}  // namespace
}  // namespace switchyard::router_tokens_test
