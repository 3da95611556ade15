// SPDX-License-Identifier: Apache-2.0
#include "support/device/grouped_problem.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "device/cuda/backend.h"
#include "device/cuda/grouped_gemm.h"
#include "device/cuda/portable/portable_gemm.h"
#include "support/compare.h"

namespace switchyard::testing {
namespace {

void put_rows(const Tensor& from, Tensor& to, std::int64_t first) {
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    std::memcpy(to.view().row(first + r), from.view().row(r),
                static_cast<std::size_t>(from.view().row_bytes()));
  }
}
Tensor rows_of(const Tensor& from, std::int64_t first, std::int64_t rows, std::int64_t columns) {
  Tensor cut({rows, columns}, from.dtype());
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(cut.view().row(r), from.view().row(first + r),
                static_cast<std::size_t>(cut.view().row_bytes()));
  }
  return cut;
}

class Problem {
 public:
  Problem(const Device& device, const GroupedSetup& setup, const std::vector<GemmGroup>& groups)
      : device_(device), setup_(setup), groups_(groups) {
    for (const GemmGroup& group : groups) {
      offsets_.push_back(static_cast<std::int32_t>(capacity_ + setup.gap));
      rows_.push_back(static_cast<std::int32_t>(group.rows));
      capacity_ += setup.gap + group.rows;
    }
    capacity_ += setup.gap;
    const auto count = static_cast<std::int64_t>(groups.size());
    offsets_on_device_ = device.copy_of(Tensor::from<std::int32_t>({count}, offsets_));
    rows_on_device_ = device.copy_of(Tensor::from<std::int32_t>({count}, rows_));
    device_groups_ = {.row_offsets = integers_of(offsets_on_device_),
                      .group_rows = integers_of(rows_on_device_),
                      .count = static_cast<int>(count),
                      .row_capacity = capacity_};
    if (setup.is_scheduled) {
      zeros_ = device.copy_of(Tensor::zeros({2}, Dtype::i32));
      device_groups_.tickets = integers_of(zeros_);
      order_ = device.copy_of(Tensor::zeros({count}, Dtype::i32));
      cuda::hopper::order_groups(device_groups_, integers_of(order_), cuda::context_of(device));
      device_groups_.order = integers_of(order_);
    }
    place_matrices();
  }

  GroupedResults run() {
    auto& context = cuda::context_of(device_);
    const Tensor a = device_.copy_of(rows_with(a_of, a_columns(setup_)));
    if (setup_.form == GemmForm::weight_gradient) {
      const Tensor b = device_.copy_of(rows_with(b_of, other_columns(setup_)));
      const cuda::WeightGradientGemm args{.dtype = setup_.dtype,
                                          .groups = device_groups_,
                                          .a = {device_rows(a)},
                                          .b = {device_rows(b)},
                                          .c = matrices(),
                                          .c_dtype = matrix_dtype(setup_),
                                          .accumulate = setup_.accumulate};
      multiply(args, context);
      return fetch_matrices();
    }
    const Tensor before = poisoned({capacity_, other_columns(setup_) + setup_.spare}, setup_.dtype);
    const Tensor c = device_.copy_of(before);
    if (setup_.form == GemmForm::input_gradient) {
      const cuda::InputGradientGemm args{.dtype = setup_.dtype,
                                         .groups = device_groups_,
                                         .a = device_rows(a),
                                         .b = matrices(),
                                         .c = device_rows(c)};
      multiply(args, context);
    } else {
      multiply_forward(a, c, context);
    }
    return fetch_rows(before, c);
  }

 private:
  template <typename Gemm>
  void multiply(const Gemm& args, cuda::Context& context) const {
    run_product(args, context);
    if (device_groups_.tickets == nullptr) return;
    run_product(args, context);  // finds the tickets as the first one has left them
    const Tensor after = device_.to_host(zeros_);
    EXPECT_TRUE(same_bits(after, Tensor::zeros(after.shape(), after.dtype()))) << setup_;
  }
  template <typename Gemm>
  void run_product(const Gemm& args, cuda::Context& context) const {
    if (setup_.kernels == GemmKernels::best) {
      cuda::grouped_gemm(args, context);
    } else if (setup_.dtype == Dtype::bf16) {
      cuda::portable::grouped_gemm<Dtype::bf16>(args, context);
    } else {
      cuda::portable::grouped_gemm<Dtype::f32>(args, context);
    }
  }

  void multiply_forward(const Tensor& a, const Tensor& c, cuda::Context& context) const {
    std::vector<Tensor> biases;
    std::vector<cuda::MatrixRef> refs;
    for (int part = 0; setup_.has_bias && part < setup_.parts; ++part) {
      for (const GemmGroup& group : groups_) {
        refs.push_back({});
        if (!has_bias(setup_, group)) continue;
        biases.push_back(device_.copy_of(bias_of(setup_, group, part)));
        refs.back() = {biases.back().data(), setup_.matrix_rows};
      }
    }
    Tensor factors = poisoned({capacity_, 1}, Dtype::f32);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      put_rows(factors_of(setup_, groups_[g]), factors, offsets_[g]);
    }
    const Tensor factors_on_device = device_.copy_of(factors);
    const auto* data = reinterpret_cast<const float*>(factors_on_device.data());
    const cuda::ForwardGemm args{.dtype = setup_.dtype,
                                 .groups = device_groups_,
                                 .a = device_rows(a),
                                 .b = matrices(),
                                 .c = device_rows(c),
                                 .bias = refs,
                                 .bias_factors = {setup_.has_factors ? data : nullptr}};
    multiply(args, context);
    device_.synchronize();
  }

  // Fills outputs with NaN, unless the product adds to them.
  void place_matrices() {
    const bool is_output = setup_.form == GemmForm::weight_gradient && !setup_.accumulate;
    const auto stride = setup_.matrix_columns + setup_.spare;
    const auto count = static_cast<std::int64_t>(groups_.size()) * setup_.parts;
    const auto each = setup_.apart ? 1 : count;  // matrices per allocation
    for (std::int64_t first = 0; first < count; first += each) {
      Tensor stack = poisoned({each * setup_.matrix_rows, stride}, matrix_dtype(setup_));
      for (std::int64_t i = first; !is_output && i < first + each; ++i) {
        put_rows(matrix_of(setup_, group_at(i), part_at(i)), stack,
                 (i - first) * setup_.matrix_rows);
      }
      stacks_.push_back(device_.copy_of(stack));
      stacks_before_.push_back(std::move(stack));
      for (std::int64_t i = 0; i < each; ++i) {
        refs_.push_back({stacks_.back().view().row(i * setup_.matrix_rows), stride});
      }
    }
  }

  const GemmGroup& group_at(std::int64_t matrix) const {
    return groups_[static_cast<std::size_t>(matrix) % groups_.size()];
  }
  int part_at(std::int64_t matrix) const {
    return static_cast<int>(matrix / static_cast<std::int64_t>(groups_.size()));
  }

  using RowsOfGroup = Tensor (*)(const GroupedSetup&, const GemmGroup&);
  Tensor rows_with(RowsOfGroup rows_of_group, std::int64_t columns) const {
    Tensor all = poisoned({capacity_, columns + setup_.spare}, setup_.dtype);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      put_rows(rows_of_group(setup_, groups_[g]), all, offsets_[g]);
    }
    return all;
  }

  static std::int32_t* integers_of(Tensor& tensor) {
    return reinterpret_cast<std::int32_t*>(tensor.data());
  }
  static cuda::SourceRows device_rows(const Tensor& tensor) {
    return {{tensor.data(), tensor.shape()[1]}};
  }
  cuda::GroupMatrices matrices() const {
    return {.refs = refs_,
            .parts = setup_.parts,
            .rows = setup_.matrix_rows,
            .columns = setup_.matrix_columns};
  }

  GroupedResults fetch_rows(const Tensor& before, const Tensor& c) const {
    Tensor after = device_.to_host(c);
    GroupedResults results(groups_.size());
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const auto rows = groups_[g].rows;
      results[g].push_back(rows_of(after, offsets_[g], rows, other_columns(setup_)));
      put_rows(rows_of(before, offsets_[g], rows, other_columns(setup_)), after, offsets_[g]);
    }
    EXPECT_TRUE(same_bits(after, before)) << "outside the groups: " << setup_;
    return results;
  }

  GroupedResults fetch_matrices() const {
    GroupedResults results(groups_.size());
    const auto rows = setup_.matrix_rows;
    std::int64_t matrix = 0;
    for (std::size_t s = 0; s < stacks_.size(); ++s) {
      Tensor after = device_.to_host(stacks_[s]);
      const Tensor& before = stacks_before_[s];
      for (std::int64_t first = 0; first < after.rows(); first += rows, ++matrix) {
        auto& of_group = results[static_cast<std::size_t>(matrix) % groups_.size()];
        of_group.push_back(rows_of(after, first, rows, setup_.matrix_columns));
        put_rows(rows_of(before, first, rows, setup_.matrix_columns), after, first);
      }
      EXPECT_TRUE(same_bits(after, before)) << "outside the matrices: " << setup_;
    }
    return results;
  }

  const Device& device_;
  const GroupedSetup& setup_;
  const std::vector<GemmGroup>& groups_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> rows_;
  std::int64_t capacity_ = 0;
  Tensor offsets_on_device_;
  Tensor rows_on_device_;
  Tensor zeros_;
  Tensor order_;
  cuda::Groups device_groups_;
  std::vector<Tensor> stacks_;
  std::vector<Tensor> stacks_before_;
  std::vector<cuda::MatrixRef> refs_;
};

}  // namespace

GroupedResults run_grouped(const Device& device, const GroupedSetup& setup,
                           const std::vector<GemmGroup>& groups) {
  return Problem(device, setup, groups).run();
}

}  // namespace switchyard::testing
