// SPDX-License-Identifier: Apache-2.0
#include "support/reference/attention_reference.h"

#include <cmath>

namespace switchyard::testing {
namespace {

// x · matrixᵀ
Doubles project(const Doubles& x, const Doubles& matrix) {
  Doubles out = zeros({x.rows(), matrix.rows()});
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t o = 0; o < matrix.rows(); ++o) {
      for (std::int64_t i = 0; i < x.shape[1]; ++i) {
        out.row(t)[o] += x.row(t)[i] * matrix.row(o)[i];
      }
    }
  }
  return out;
}

// Applies the rotary embedding to one head's vector, in place.
void turn(double* head, std::int64_t size, double base, std::int64_t position) {
  for (std::int64_t i = 0; i < size / 2; ++i) {
    const double frequency =
        std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(size));
    const double angle = static_cast<double>(position) * frequency;
    const double a = head[i];
    const double b = head[i + size / 2];
    head[i] = a * std::cos(angle) - b * std::sin(angle);
    head[i + size / 2] = a * std::sin(angle) + b * std::cos(angle);
  }
}

// Computes the output of one query of a head over the keys at or before it in its sequence.
void attend(const AttentionSizes& sizes, const Doubles& qkv, std::int64_t t, std::int64_t column,
            double* mixed) {
  const auto size = sizes.hidden / sizes.heads;
  double sum = 0.0;
  for (auto s = t / sizes.length * sizes.length; s <= t; ++s) {
    double score = 0.0;
    for (std::int64_t i = 0; i < size; ++i) {
      score += qkv.row(t)[column + i] * qkv.row(s)[sizes.hidden + column + i];
    }
    const double weight = std::exp(score / std::sqrt(static_cast<double>(size)));
    sum += weight;
    for (std::int64_t i = 0; i < size; ++i) {
      mixed[i] += weight * qkv.row(s)[2 * sizes.hidden + column + i];
    }
  }
  for (std::int64_t i = 0; i < size; ++i) mixed[i] /= sum;
}

}  // namespace

Doubles reference_attention(const AttentionSizes& sizes, const Doubles& x,
                            const Doubles& qkv_weight, const Doubles& out_weight) {
  Doubles qkv = project(x, qkv_weight);
  const auto size = sizes.hidden / sizes.heads;
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t head = 0; head < 2 * sizes.heads; ++head) {
      turn(qkv.row(t) + head * size, size, sizes.rotary_base, t % sizes.length);
    }
  }
  Doubles mixed = zeros(x.shape);
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t column = 0; column < sizes.hidden; column += size) {
      attend(sizes, qkv, t, column, mixed.row(t) + column);
    }
  }
  return project(mixed, out_weight);
}

}  // namespace switchyard::testing
