// SPDX-License-Identifier: Apache-2.0
// The shared expert: a token's bits depend on nothing but the token.
#include <gtest/gtest.h>

#include <cstring>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/device.h"

namespace switchyard::shared_expert_test {
namespace {

using testing::Random;
using testing::same_bits;

struct Results {
  Tensor y, inner, d_x;
  ExpertGradients gradients;
};

struct Case {
  std::int64_t hidden;
  std::int64_t intermediate;
  Dtype dtype;
  Activation activation = Activation::swiglu;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.hidden << " x " << c.intermediate << " " << name_of(c.dtype);
}

class SharedExpertTest : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr std::int64_t kTokens = 150;

  SharedExpertTest()
      : options_{.hidden = GetParam().hidden,
                 .intermediate = GetParam().intermediate,
                 .dtype = GetParam().dtype,
                 .activation = GetParam().activation} {
    Random random(6);
    weights_ = random_expert(random, options_, Biases::all);
    x_ = random.tensor({kTokens, options_.hidden}, options_.dtype);
    y_ = random.tensor({kTokens, options_.hidden}, options_.dtype);
    d_y_ = random.tensor({kTokens, options_.hidden}, options_.dtype);
  }

  // Tokens first … last − 1 alone.
  Results run(std::int64_t first, std::int64_t last, const Device& device,
              InnerRows inner_rows = InnerRows::kept) const {
    const auto part = [&](const Tensor& all) { return all.view().slice(first, last); };
    const std::int64_t count = last - first;
    Results results{Tensor({count, options_.hidden}, options_.dtype),
                    Tensor({count, options_.inner_width()}, options_.dtype),
                    Tensor::zeros({count, options_.hidden}, options_.dtype),
                    testing::gradients_for(weights_)};
    std::memcpy(results.y.data(), part(y_).data(), static_cast<std::size_t>(results.y.bytes()));
    backend_of(device).shared_forward({.options = options_,
                                       .weights = weights_,
                                       .x = part(x_),
                                       .inner = results.inner,
                                       .y = results.y});
    Tensor inner = results.inner.clone();
    if (inner_rows == InnerRows::to_be_computed) testing::poison(inner);
    backend_of(device).shared_backward({.options = options_,
                                        .weights = weights_,
                                        .x = part(x_),
                                        .inner = inner,
                                        .inner_rows = inner_rows,
                                        .d_y = part(d_y_),
                                        .d_x = results.d_x,
                                        .gradients = results.gradients});
    return results;
  }

  ExpertsOptions options_;
  ExpertWeights weights_;
  Tensor x_, y_, d_y_;
};

TEST_P(SharedExpertTest, ATokensBitsDependOnTheTokenAlone) {
  const Results whole = run(0, kTokens, {});
  for (const std::int64_t count : {1, 2, 7, 15, 16, 17, 31, 40, 48, 63, 64, 65, 130}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{5}, kTokens - count}) {
      const Results part = run(first, first + count, {});
      const auto slice = [&](const Tensor& all) { return all.view().slice(first, first + count); };
      ASSERT_TRUE(same_bits(part.y, slice(whole.y))) << count << " tokens from " << first;
      ASSERT_TRUE(same_bits(part.inner, slice(whole.inner))) << count << " from " << first;
      ASSERT_TRUE(same_bits(part.d_x, slice(whole.d_x))) << count << " tokens from " << first;
    }
  }
}

TEST_P(SharedExpertTest, BitsDoNotDependOnThreadsOrWhatIsKept) {
  const Results expected = run(0, kTokens, {});
  for (const int num_threads : {1, 2, 4}) {
    for (const auto inner_rows : {InnerRows::kept, InnerRows::to_be_computed}) {
      const Device device = Device::cpu({.num_threads = num_threads});
      const Results results = run(0, kTokens, device, inner_rows);
      EXPECT_TRUE(same_bits(results.y, expected.y));
      EXPECT_TRUE(same_bits(results.d_x, expected.d_x));
      testing::expect_same_bits(results.gradients, expected.gradients);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SharedExpertTest,
                         ::testing::Values(Case{17, 5, Dtype::f32}, Case{64, 48, Dtype::f32},
                                           Case{100, 37, Dtype::f32, Activation::gelu},
                                           Case{512, 96, Dtype::f32}, Case{17, 5, Dtype::bf16},
                                           Case{64, 48, Dtype::bf16},
                                           Case{100, 37, Dtype::bf16, Activation::gelu},
                                           Case{512, 96, Dtype::bf16}));

}  // namespace
}  // namespace switchyard::shared_expert_test
