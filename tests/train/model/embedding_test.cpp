// SPDX-License-Identifier: Apache-2.0
#include "model/embedding.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/compare.h"
#include "support/random.h"

namespace switchyard::train::embedding_test {
namespace {

using testing::Random;
using testing::same_bits;

TEST(Embedding, TakesRows) {
  const Tensor table = Tensor::from<float>({3, 2}, {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F});
  const std::vector<std::uint8_t> tokens{2, 0, 2, 1};
  Tensor y({4, 2}, Dtype::f32);
  Compute compute{Device()};
  embed(compute, table, tokens, y);
  EXPECT_TRUE(
      same_bits(y, Tensor::from<float>({4, 2}, {5.0F, 6.0F, 1.0F, 2.0F, 5.0F, 6.0F, 3.0F, 4.0F})));
}

// Linear: the gradient of a row is the sum over the tokens that took it, added to what was there.
TEST(Embedding, AddsGradientsOfEqualTokens) {
  const Tensor d_y = Tensor::from<float>({3, 2}, {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F});
  const std::vector<std::uint8_t> tokens{2, 0, 2};
  Tensor d_table = Tensor::from<float>({3, 2}, {0.5F, 0.5F, 7.0F, 8.0F, 0.25F, 0.25F});
  Compute compute{Device()};
  embed_backward(compute, tokens, d_y, d_table);
  EXPECT_TRUE(
      same_bits(d_table, Tensor::from<float>({3, 2}, {3.5F, 4.5F, 7.0F, 8.0F, 6.25F, 8.25F})));
}

TEST(Embedding, BitsDoNotDependOnThreads) {
  const Tensor d_y = Random(1).tensor({500, 200}, Dtype::f32);
  const Tensor table = Random(2).tensor({256, 200}, Dtype::f32);
  Random random(3);
  std::vector<std::uint8_t> tokens;
  for (int t = 0; t < 500; ++t) tokens.push_back(static_cast<std::uint8_t>(random.below(20)));
  std::vector<Tensor> rows;
  std::vector<Tensor> gradients;
  for (const int threads : {1, 3}) {
    Compute compute(Device::cpu({.num_threads = threads}));
    embed(compute, table, tokens, rows.emplace_back(Shape{500, 200}, Dtype::f32));
    embed_backward(compute, tokens, d_y, gradients.emplace_back(table.clone()));
  }
  EXPECT_TRUE(same_bits(rows[1], rows[0]));
  EXPECT_TRUE(same_bits(gradients[1], gradients[0]));
}

TEST(Embedding, NoTokensChangeNothing) {
  Tensor table = Random(2).tensor({4, 3}, Dtype::f32);
  const Tensor before = table.clone();
  Compute compute{Device()};
  embed(compute, table, {}, Tensor({0, 3}, Dtype::f32));
  embed_backward(compute, {}, Tensor({0, 3}, Dtype::f32), table);
  EXPECT_TRUE(same_bits(table, before));
}

}  // namespace
}  // namespace switchyard::train::embedding_test
