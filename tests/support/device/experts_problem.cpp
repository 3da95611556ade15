// SPDX-License-Identifier: Apache-2.0
#include "support/device/experts_problem.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/reference/reference.h"

namespace switchyard::testing {
namespace {

void copy_rows(const TensorView& to, const ConstTensorView& from) {
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    std::memcpy(to.row(r), from.row(r), at(from.row_bytes()));
  }
}

// Returns the rows of one expert's group.
template <typename View>
auto group_of(const ExpertsProblem& problem, std::size_t expert, const View& rows) {
  const auto first = problem.row_offsets.span<std::int32_t>()[expert];
  return rows.slice(first, first + problem.group_rows.span<std::int32_t>()[expert]);
}

}  // namespace

ExpertsProblem::ExpertsProblem(const ExpertsOptions& the_options, Biases biases,
                               std::vector<std::int32_t> rows_of_groups, std::int64_t align)
    : options(the_options), alignment(align) {
  const auto num_experts = static_cast<std::int64_t>(rows_of_groups.size());
  group_rows = Tensor::from<std::int32_t>({num_experts}, rows_of_groups);
  row_offsets = Tensor::zeros({num_experts + 1}, Dtype::i32);
  const auto offsets = row_offsets.span<std::int32_t>();
  const auto step = static_cast<std::int32_t>(alignment);
  for (std::size_t e = 0; e < rows_of_groups.size(); ++e) {
    offsets[e + 1] = offsets[e] + (rows_of_groups[e] + step - 1) / step * step;
  }
  const std::int64_t capacity = offsets.back() + 3;  // 3 spare rows after the last group
  rows = poisoned({capacity, options.hidden}, options.dtype);
  d_out = poisoned({capacity, options.hidden}, options.dtype);
  row_weights = poisoned({capacity}, Dtype::f32);
  for (std::size_t e = 0; e < rows_of_groups.size(); ++e) {
    Random random(100 + e);
    weights.push_back(random_expert(random, options, biases));
    const Shape shape{rows_of_groups[e], options.hidden};
    copy_rows(group_of(*this, e, rows.view()), random.tensor(shape, options.dtype));
    copy_rows(group_of(*this, e, d_out.view()), random.tensor(shape, options.dtype));
    copy_rows(group_of(*this, e, row_weights.view()),
              random.tensor({rows_of_groups[e]}, Dtype::f32));
  }
}

TokensProblem::TokensProblem(ExpertsProblem& p, std::int64_t num_tokens, std::int64_t k)
    : top_k(k),
      x(poisoned({num_tokens, p.options.hidden}, p.options.dtype)),
      d_y(poisoned(x.shape(), p.options.dtype)),
      weights(poisoned({num_tokens, k}, Dtype::f32)),
      row_sources(poisoned({p.num_rows()}, Dtype::i32)) {
  Random random(7);
  std::vector<std::int32_t> free(at(num_tokens * k));
  std::iota(free.begin(), free.end(), 0);
  const Tensor all_x = random.tensor(x.shape(), p.options.dtype);
  const Tensor all_d_y = random.tensor(x.shape(), p.options.dtype);
  const auto copy_row = [](const Tensor& from, std::int64_t i, Tensor& to, std::int64_t j) {
    copy_rows(to.view().slice(j, j + 1), from.view().slice(i, i + 1));
  };
  for (std::size_t e = 0; e < p.weights.size(); ++e) {
    const auto first = p.row_offsets.span<std::int32_t>()[e];
    for (auto row = first; row < first + p.group_rows.span<std::int32_t>()[e]; ++row) {
      std::swap(free[at(random.below(std::ssize(free)))], free.back());
      const auto assignment = free.back();
      free.pop_back();
      const auto token = assignment / k;
      row_sources.span<std::int32_t>()[at(row)] = assignment;
      weights.span<float>()[at(assignment)] = p.row_weights.span<float>()[at(row)];
      copy_row(all_x, token, x, token);
      copy_row(all_d_y, token, d_y, token);
      copy_row(x, token, p.rows, row);
      copy_row(d_y, token, p.d_out, row);
    }
  }
}

ExpertsResults run_experts(const ExpertsProblem& problem, const ExpertsRun& run) {
  const auto& options = problem.options;
  const Experts experts(options, run.device);
  const auto capacity = problem.num_rows();
  ExpertsResults results{poisoned({capacity, options.hidden}, options.dtype),
                         poisoned({capacity, options.inner_width()}, options.dtype),
                         poisoned({capacity, options.hidden}, options.dtype),
                         poisoned({capacity}, Dtype::f32),
                         {}};
  experts.forward(problem.weights, problem.groups(),
                  {.rows = problem.rows, .row_weights = problem.row_weights},
                  {.out = results.out, .inner = results.inner});
  for (const auto& expert : problem.weights) {
    results.gradients.push_back(gradients_for(expert, run.gradient_dtype));
  }
  Tensor rows = problem.rows.clone();
  Tensor inner = run.inner_rows == InnerRows::kept ? results.inner.clone()
                                                   : poisoned(results.inner.shape(), options.dtype);
  experts.backward(problem.weights, problem.groups(),
                   {.rows = rows,
                    .row_weights = problem.row_weights,
                    .inner = inner,
                    .inner_rows = run.inner_rows,
                    .d_out = problem.d_out},
                   {.d_rows = results.d_rows,
                    .d_row_weights = results.d_row_weights,
                    .gradients = results.gradients});
  return results;
}

Tensor without_pads(const ExpertsProblem& problem, const ConstTensorView& rows) {
  std::int64_t total = 0;
  for (const auto count : problem.group_rows.span<std::int32_t>()) total += count;
  Tensor result(rows.shape().with_rows(total), rows.dtype());
  std::int64_t next = 0;
  for (std::size_t e = 0; e < problem.weights.size(); ++e) {
    const auto group = group_of(problem, e, rows);
    copy_rows(result.view().slice(next, next + group.rows()), group);
    next += group.rows();
  }
  return result;
}

bool has_poisoned_pads(const ExpertsProblem& problem, const ConstTensorView& rows) {
  const Tensor pad = poisoned(rows.shape().with_rows(1), rows.dtype());
  const auto offsets = problem.row_offsets.span<std::int32_t>();
  const auto group_rows = problem.group_rows.span<std::int32_t>();
  std::size_t e = 0;
  for (std::int64_t r = 0; r < rows.rows(); ++r) {
    while (e < group_rows.size() && r >= offsets[e + 1]) ++e;
    const bool is_pad = e == group_rows.size() || r >= offsets[e] + group_rows[e];
    if (is_pad && !same_bits(rows.slice(r, r + 1), pad)) return false;
  }
  return true;
}

Tensor reference_out(const ExpertsProblem& problem, std::size_t expert) {
  const auto& options = problem.options;
  const auto weights = doubles_of(problem.weights[expert]);
  const auto rows = doubles_of(group_of(problem, expert, problem.rows.view()));
  const auto row_weights = doubles_of(group_of(problem, expert, problem.row_weights.view()));
  Doubles out = zeros(rows.shape);
  for (std::int64_t r = 0; r < rows.rows(); ++r) {
    // At the output stage, combine applies the weight.
    const bool weigh = options.weight_stage != WeightStage::output;
    const auto row =
        reference_expert(options, weights, rows.row(r), weigh ? row_weights.values[at(r)] : 1.0);
    std::ranges::copy(row, out.row(r));
  }
  return tensor_of(out);
}

ReferenceGradients reference_gradients(const ExpertsProblem& problem, std::size_t expert) {
  const auto& options = problem.options;
  auto weights = doubles_of(problem.weights[expert]);
  const auto d_out = doubles_of(group_of(problem, expert, problem.d_out.view()));
  const auto width = at(options.hidden);
  const auto loss_of = [&](const Doubles& rows, const Doubles& row_weights) {
    double loss = 0.0;
    for (std::int64_t r = 0; r < rows.rows(); ++r) {
      const auto out = reference_expert(options, weights, rows.row(r), row_weights.values[at(r)]);
      for (std::size_t i = 0; i < width; ++i) loss += out[i] * d_out.row(r)[i];
    }
    return loss;
  };
  Doubles rows = doubles_of(group_of(problem, expert, problem.rows.view()));
  Doubles row_weights = doubles_of(group_of(problem, expert, problem.row_weights.view()));
  const Loss loss = [&] { return loss_of(rows, row_weights); };
  ReferenceGradients result{zeros(rows.shape), zeros(row_weights.shape),
                            numeric_gradient(weights, loss)};
  // A row's gradient depends on that row alone.
  for (std::int64_t r = 0; r < rows.rows(); ++r) {
    Doubles row{{1, options.hidden}, {rows.row(r), rows.row(r) + width}};
    Doubles weight{{1}, {row_weights.values[at(r)]}};
    const Loss row_loss = [&] {
      const auto out = reference_expert(options, weights, row.row(0), weight.values[0]);
      double sum = 0.0;
      for (std::size_t i = 0; i < width; ++i) sum += out[i] * d_out.row(r)[i];
      return sum;
    };
    std::ranges::copy(numeric_gradient(row, row_loss).values, result.d_rows.row(r));
    result.d_row_weights.values[at(r)] = numeric_gradient(weight, row_loss).values[0];
  }
  return result;
}

}  // namespace switchyard::testing
