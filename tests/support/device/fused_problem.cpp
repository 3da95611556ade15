// SPDX-License-Identifier: Apache-2.0
#include "support/device/fused_problem.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "support/compare.h"
#include "support/device/apart_rows.h"
#include "support/random.h"
#include "support/reference/reference.h"

namespace switchyard::testing {
namespace {

using Side = cuda::WeightGradientGemm::Side;

std::vector<std::int32_t> scrambled(std::int32_t first, std::int32_t end, Random& random) {
  std::vector<std::int32_t> numbers(at(end - first));
  std::iota(numbers.begin(), numbers.end(), first);
  for (std::int64_t i = std::ssize(numbers) - 1; i > 0; --i) {
    std::swap(numbers[at(i)], numbers[at(random.below(i + 1))]);
  }
  return numbers;
}

void copy_row(const ConstTensorView& from, std::int64_t from_row, Tensor& to, std::int64_t row) {
  std::memcpy(to.view().row(row), from.row(from_row), at(from.row_bytes()));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const FusedSetup& setup) {
  return out << name_of(setup.form) << ", I " << setup.intermediate << ", H " << setup.hidden
             << ", K " << setup.top_k << ", " << setup.group_rows.size() << " groups aligned to "
             << setup.alignment;
}

std::ostream& operator<<(std::ostream& out, const GradientWay& way) {
  return out << (way.narrow == Side::a ? "a" : "b") << " narrow, " << way.parts
             << (way.parts == 1 ? " part of " : " parts of ") << name_of(way.dtype)
             << (way.accumulate ? ", added to" : "") << (way.from_tokens ? ", from tokens" : "");
}

std::vector<std::int32_t> random_groups(int count, std::int64_t most) {
  Random random(17);
  std::vector<std::int32_t> rows;
  for (int g = 0; g < count; ++g) {
    rows.push_back(static_cast<std::int32_t>(random.below(most + 1)));
  }
  return rows;
}

std::vector<FusedSetup> setups_of_all_sizes() {
  constexpr std::pair<std::int64_t, std::int64_t> kSizes[]{
      {64, 64},  {72, 128},  {128, 72},  {136, 136}, {192, 320}, {256, 64},
      {72, 576}, {256, 576}, {136, 320}, {768, 136}, {768, 72}};
  constexpr std::int64_t kTopKs[]{1, 2, 3, 8};
  std::vector<std::int32_t> groups{0, 1, 5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 513};
  std::vector<FusedSetup> setups;
  for (const auto& [intermediate, hidden] : kSizes) {
    setups.push_back({.intermediate = intermediate,
                      .hidden = hidden,
                      .group_rows = groups,
                      .top_k = kTopKs[setups.size() % 4]});
    std::ranges::rotate(groups, groups.begin() + 5);
    if (setups.size() % 4 == 0) std::ranges::reverse(groups);
  }
  return setups;
}

std::vector<FusedSetup> setups_of_all_groups() {
  const std::vector<FusedSetup> setups{
      {.intermediate = 136, .hidden = 136, .group_rows = {0, 0, 0, 129, 0, 0}, .top_k = 1},
      {.intermediate = 256, .hidden = 72, .group_rows = {0, 65, 192, 0}, .top_k = 3},
      {.intermediate = 72, .hidden = 136, .group_rows = random_groups(200, 70), .top_k = 8},
      {.intermediate = 264, .hidden = 64, .group_rows = {1500, 1100}},
      {.intermediate = 64, .hidden = 128, .group_rows = {0, 0, 0}}};
  std::vector<FusedSetup> all;
  for (const std::int64_t alignment : {1, 16, 128}) {
    for (const FusedSetup& setup : setups) all.emplace_back(setup).alignment = alignment;
  }
  return all;
}

FusedProblem::FusedProblem(const FusedSetup& the_setup)
    : setup(the_setup),
      options(setup.form.in(ExpertsOptions{.hidden = setup.hidden,
                                           .intermediate = setup.intermediate,
                                           .dtype = Dtype::bf16,
                                           .clamp_limit = 0.7F})) {
  lay_out_groups();
  assign_tokens();
  Random random(3);
  inner = random.tensor({capacity(), 2 * setup.intermediate}, Dtype::bf16);
  for (std::int64_t r = 0; r < capacity(); ++r) {
    if (groups_of_rows[at(r)] < 0) poison(inner.view().slice(r, r + 1));
  }
  gate_up = random.tensor({num_groups() * 2 * setup.intermediate, setup.hidden}, Dtype::bf16);
  down = random.tensor({num_groups() * setup.hidden, setup.intermediate}, Dtype::bf16);
}

void FusedProblem::lay_out_groups() {
  std::vector<std::int32_t> offsets;
  for (int g = 0; g < num_groups(); ++g) {
    offsets.push_back(static_cast<std::int32_t>(groups_of_rows.size()));
    groups_of_rows.insert(groups_of_rows.end(), at(setup.group_rows[at(g)]), g);
    const auto step = at(setup.alignment);
    groups_of_rows.resize((groups_of_rows.size() + step - 1) / step * step, -1);
  }
  groups_of_rows.resize(groups_of_rows.size() + 3, -1);
  row_offsets = Tensor::from<std::int32_t>({num_groups()}, offsets);
  group_rows = Tensor::from<std::int32_t>({num_groups()}, setup.group_rows);
}

void FusedProblem::assign_tokens() {
  const auto num_rows = std::ssize(groups_of_rows);
  const auto used = num_rows - std::ranges::count(groups_of_rows, -1);
  const std::int64_t num_tokens = 3 + (used * 5 / 4 + setup.top_k) / setup.top_k;
  const std::int64_t num_assignments = num_tokens * setup.top_k;
  Random random(5);
  const auto assignments =
      scrambled(static_cast<std::int32_t>(setup.top_k),
                static_cast<std::int32_t>(num_assignments - setup.top_k), random);
  const Tensor x = random.tensor({num_tokens, setup.hidden}, Dtype::bf16);
  const Tensor weights = random.tensor({num_assignments}, Dtype::f32);
  sources = Tensor({num_rows}, Dtype::i32);
  tokens = poisoned(x.shape(), Dtype::bf16);
  rows = poisoned({num_rows, setup.hidden}, Dtype::bf16);
  token_weights = poisoned(weights.shape(), Dtype::f32);
  row_weights = poisoned({num_rows}, Dtype::f32);
  std::size_t next = 0;
  for (std::int64_t r = 0; r < num_rows; ++r) {
    auto& source = sources.span<std::int32_t>()[at(r)];
    source = r % 2 == 0 ? std::numeric_limits<std::int32_t>::max() : static_cast<int>(-r);
    if (groups_of_rows[at(r)] < 0) continue;
    source = assignments[next++];
    copy_row(x, source / setup.top_k, tokens, source / setup.top_k);
    copy_row(x, source / setup.top_k, rows, r);
    copy_row(weights, source, token_weights, source);
    copy_row(weights, source, row_weights, r);
  }
}

ConstTensorView FusedProblem::group(int index, const ConstTensorView& of) const {
  const auto first = row_offsets.span<std::int32_t>()[at(index)];
  return of.slice(first, first + setup.group_rows[at(index)]);
}

Tensor FusedProblem::grouped(const ConstTensorView& of) const {
  const auto used = capacity() - std::ranges::count(groups_of_rows, -1);
  Tensor result(of.shape().with_rows(used), of.dtype());
  std::int64_t next = 0;
  for (std::int64_t r = 0; r < capacity(); ++r) {
    if (groups_of_rows[at(r)] >= 0) copy_row(of, r, result, next++);
  }
  return result;
}

StackShape FusedProblem::gradient_shape(const GradientWay& way) const {
  const bool is_inner = way.narrow == Side::b;
  return {num_groups(), way.parts, is_inner ? setup.intermediate : setup.hidden,
          is_inner ? setup.hidden : setup.intermediate};
}

Tensor FusedProblem::gradients_before(const GradientWay& way) const {
  const Shape shape = gradient_shape(way).stacked();
  return way.accumulate ? Random(9).tensor(shape, way.dtype) : poisoned(shape, way.dtype);
}

Doubles FusedProblem::expected_gradient(const GradientWay& way, int index, int part) const {
  const Doubles x = doubles_of(group(index, rows));
  const Doubles wide = doubles_of(group(index, inner));
  const StackShape shape = gradient_shape(way);
  Doubles sums = zeros({shape.rows, shape.columns});
  for (std::int64_t r = 0; r < x.rows(); ++r) {
    const double* const of_part = wide.row(r) + part * setup.intermediate;
    const double* const left = way.narrow == Side::b ? of_part : x.row(r);
    const double* const right = way.narrow == Side::b ? x.row(r) : of_part;
    for (std::int64_t m = 0; m < shape.rows; ++m) {
      double* const to = sums.row(m);
      for (std::int64_t n = 0; n < shape.columns; ++n) to[n] += left[m] * right[n];
    }
  }
  return sums;
}

}  // namespace switchyard::testing
