// SPDX-License-Identifier: Apache-2.0
// The program's rounding mode and flush-to-zero settings change no bit of the library's results.
#include <gtest/gtest.h>

#include <cfenv>
#include <functional>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/load_balancer.h"
#include "switchyard/matmul.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace switchyard::floats_test {
namespace {

using testing::Random;
using testing::same_bits;

constexpr int kRanks = 2;

// Restores what the thread had.
class Environment {
 public:
  Environment() { std::fegetenv(&before_); }
  ~Environment() { std::fesetenv(&before_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::fenv_t before_{};
};

void round_upward() { std::fesetround(FE_UPWARD); }
void flush_tiny_numbers() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040U);  // FTZ and DAZ
#endif
}

// Tiny numbers, and sums that are rounded.
struct Results {
  Tensor y, d_x, product, sum, bias;
  MoeGradients gradients;
};

void make_tiny(const TensorView& view) {
  for (float& v : view.span<float>()) v *= 1e-38F;
}

Results results_on(Communicator& comm, const std::function<void()>& change) {
  auto options = testing::tiny_layer_options();
  const auto placement = ExpertPlacement::contiguous(6, comm.size());
  const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
  const Tensor matrix = Random(8).tensor({6, 6}, Dtype::f32);
  Tensor x = Random(7).tensor({150, options.hidden}, Dtype::f32);
  for (std::int64_t t = 0; t < 75; ++t) make_tiny(x.view().slice(t, t + 1));

  const Environment restored;
  change();
  const Device device = Device::cpu({.num_threads = 2});  // whose thread begins as this one is
  MoeLayer layer(comm, placement, options, device);
  Results results;
  results.gradients = testing::gradients_for(weights);
  SavedForBackward saved;
  results.y = layer.forward(weights, {.x = x}, saved);
  results.d_x = Tensor({150, options.hidden}, Dtype::f32);
  layer.backward(weights, saved, x, {.d_x = results.d_x, .gradients = results.gradients});
  results.product = Tensor({6, 6}, Dtype::f32);
  matmul(device, {.a = x.view().slice(70, 76), .b = matrix, .c = results.product});
  results.sum = x.clone();
  comm.all_reduce(results.sum);
  results.bias = Tensor::zeros({3}, Dtype::f32);
  LoadBalancer(3, {.rule = BiasRule::moving_average})
      .update(std::vector<std::int64_t>{1, 5, 9}, 0, results.bias);
  return results;
}

// One rank changes its environment, and the other does not.
std::vector<Results> results_of(const std::function<void()>& change) {
  std::vector<Results> results(kRanks);
  run_ranks(kRanks, [&](Communicator& comm) {
    results[static_cast<std::size_t>(comm.rank())] = results_on(
        comm, comm.rank() == 0 ? change : [] {});
  });
  return results;
}

void expect_plain_bits(const std::function<void()>& change) {
  const auto plain = results_of([] {});
  const auto changed = results_of(change);
  for (std::size_t r = 0; r < kRanks; ++r) {
    EXPECT_TRUE(same_bits(changed[r].y, plain[r].y)) << "y of rank " << r;
    EXPECT_TRUE(same_bits(changed[r].d_x, plain[r].d_x)) << "d_x of rank " << r;
    EXPECT_TRUE(same_bits(changed[r].product, plain[r].product)) << "product of rank " << r;
    EXPECT_TRUE(same_bits(changed[r].sum, plain[r].sum)) << "sum of rank " << r;
    EXPECT_TRUE(same_bits(changed[r].bias, plain[r].bias)) << "bias of rank " << r;
    EXPECT_TRUE(same_bits(changed[r].gradients.router.gate, plain[r].gradients.router.gate));
    for (std::size_t e = 0; e < plain[r].gradients.experts.size(); ++e) {
      testing::expect_same_bits(changed[r].gradients.experts[e], plain[r].gradients.experts[e]);
    }
  }
}

TEST(HostFloats, AnotherRoundingModeChangesNoBit) { expect_plain_bits(&round_upward); }

TEST(HostFloats, FlushedTinyNumbersChangeNoBit) { expect_plain_bits(&flush_tiny_numbers); }

TEST(HostFloats, TheCallersModesAreRestored) {
  const Environment restored;
  round_upward();
  matmul({}, {.a = Random(1).tensor({4, 4}, Dtype::f32),
              .b = Random(2).tensor({4, 4}, Dtype::f32),
              .c = Tensor({4, 4}, Dtype::f32)});
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
}

}  // namespace
}  // namespace switchyard::floats_test
