// SPDX-License-Identifier: Apache-2.0
#include "support/reference/swiglu_reference.h"

#include <cmath>

namespace switchyard::testing {
namespace {

std::vector<double> times(const Doubles& matrix, const double* vector) {
  std::vector<double> product(static_cast<std::size_t>(matrix.rows()));
  for (std::int64_t r = 0; r < matrix.rows(); ++r) {
    const double* row = matrix.row(r);
    double sum = 0.0;
    for (std::int64_t c = 0; c < matrix.shape[1]; ++c) sum += row[c] * vector[c];
    product[static_cast<std::size_t>(r)] = sum;
  }
  return product;
}

// to += matrixᵀ · vector
void add_transposed(const Doubles& matrix, const std::vector<double>& vector, double* to) {
  for (std::int64_t r = 0; r < matrix.rows(); ++r) {
    const double* row = matrix.row(r);
    const double factor = vector[static_cast<std::size_t>(r)];
    for (std::int64_t c = 0; c < matrix.shape[1]; ++c) to[c] += factor * row[c];
  }
}

// gradient += left · rightᵀ
void add_product(Doubles& gradient, const std::vector<double>& left, const double* right) {
  for (std::int64_t r = 0; r < gradient.rows(); ++r) {
    double* row = gradient.row(r);
    const double factor = left[static_cast<std::size_t>(r)];
    for (std::int64_t c = 0; c < gradient.shape[1]; ++c) row[c] += factor * right[c];
  }
}

}  // namespace

SwigluResults reference_swiglu(const SwigluProblem& problem) {
  const std::int64_t num_tokens = problem.x.rows();
  const std::int64_t hidden = problem.x.shape[1];
  const std::int64_t top_k = problem.weights.shape[1];
  SwigluResults results{.y = zeros(problem.x.shape), .d_x = zeros(problem.x.shape)};
  for (const auto& expert : problem.experts) {
    results.gradients.push_back({.gate = zeros(expert.gate.shape),
                                 .up = zeros(expert.up.shape),
                                 .down = zeros(expert.down.shape)});
  }
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      const auto id =
          static_cast<std::size_t>(problem.expert_ids[static_cast<std::size_t>(t * top_k + k)]);
      const ReferenceExpert& expert = problem.experts[id];
      ReferenceExpert& gradient = results.gradients[id];
      const double weight = problem.weights.row(t)[k];
      const double* x = problem.x.row(t);
      const auto gate = times(expert.gate, x);
      const auto up = times(expert.up, x);
      std::vector<double> inner(gate.size());
      for (std::size_t i = 0; i < inner.size(); ++i) {
        inner[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
      }
      const auto out = times(expert.down, inner.data());
      std::vector<double> d_out(static_cast<std::size_t>(hidden));
      for (std::int64_t h = 0; h < hidden; ++h) {
        results.y.row(t)[h] += weight * out[static_cast<std::size_t>(h)];
        d_out[static_cast<std::size_t>(h)] = weight * problem.d_y.row(t)[h];
      }
      add_product(gradient.down, d_out, inner.data());
      std::vector<double> d_inner(inner.size());
      add_transposed(expert.down, d_out, d_inner.data());
      std::vector<double> d_gate(inner.size());
      std::vector<double> d_up(inner.size());
      for (std::size_t i = 0; i < inner.size(); ++i) {
        const double sigmoid = 1.0 / (1.0 + std::exp(-gate[i]));
        d_up[i] = d_inner[i] * gate[i] * sigmoid;
        d_gate[i] = d_inner[i] * up[i] * sigmoid * (1.0 + gate[i] * (1.0 - sigmoid));
      }
      add_product(gradient.gate, d_gate, x);
      add_product(gradient.up, d_up, x);
      add_transposed(expert.gate, d_gate, results.d_x.row(t));
      add_transposed(expert.up, d_up, results.d_x.row(t));
    }
  }
  return results;
}

}  // namespace switchyard::testing
