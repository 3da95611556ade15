// SPDX-License-Identifier: Apache-2.0
#include "model/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "model/row_math.h"

namespace switchyard::train {
namespace {

// Returns −log softmax(row)[target]. Replaces the row by its exponentials and sets `sum` to their
// sum.
double loss_of_row(float* row, std::int64_t n, std::uint8_t target, float& sum) {
  const double logit = row[target];
  const auto exps = exp_row(row, n, 1.0F);
  sum = exps.sum;
  return std::log(static_cast<double>(sum)) + exps.largest - logit;
}

// Returns the sum of row_loss(t) over all rows, added in order.
template <typename RowLoss>
double sum_of_rows(Compute& compute, std::size_t rows, const RowLoss& row_loss) {
  std::vector<double> losses(rows);
  compute.for_each(static_cast<std::int64_t>(rows), [&](std::int64_t first, std::int64_t last) {
    for (auto t = first; t < last; ++t) losses[static_cast<std::size_t>(t)] = row_loss(t);
  });
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

}  // namespace

double cross_entropy(Compute& compute, const ConstTensorView& logits,
                     std::span<const std::uint8_t> targets) {
  const auto n = logits.shape()[1];
  return sum_of_rows(compute, targets.size(), [&](std::int64_t t) {
    std::vector<float> row(row_of(logits, t), row_of(logits, t) + n);
    float sum = 0.0F;
    return loss_of_row(row.data(), n, targets[static_cast<std::size_t>(t)], sum);
  });
}

double cross_entropy_with_gradient(Compute& compute, const TensorView& logits,
                                   std::span<const std::uint8_t> targets, float scale) {
  const auto n = logits.shape()[1];
  return sum_of_rows(compute, targets.size(), [&](std::int64_t t) {
    float* row = row_of(logits, t);
    const auto target = targets[static_cast<std::size_t>(t)];
    float sum = 0.0F;
    const double loss = loss_of_row(row, n, target, sum);
    const float factor = scale / sum;
    for (std::int64_t i = 0; i < n; ++i) row[i] *= factor;
    row[target] -= scale;
    return loss;
  });
}

}  // namespace switchyard::train
