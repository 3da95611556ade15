// SPDX-License-Identifier: Apache-2.0
// Grouped products on a GPU against double precision, and to the bit whatever surrounds a group.
#include "device/cuda/grouped_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/grouped_problem.h"

namespace switchyard::grouped_gemm_test {
namespace {

using testing::GemmForm;
using testing::GemmGroup;
using testing::GemmKernels;
using testing::GroupedSetup;
using testing::run_grouped;

constexpr GemmForm kForms[] = {GemmForm::forward, GemmForm::input_gradient,
                               GemmForm::weight_gradient};

class CudaGroupedGemm : public ::testing::Test {
 protected:
  void SetUp() override {
    static const std::string reason = testing::reason_for_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    device = Device::cuda(testing::cuda_options());
  }

  Device device;
};

std::vector<GemmGroup> groups_of(const std::vector<std::int64_t>& rows) {
  std::vector<GemmGroup> groups;
  for (const auto count : rows) groups.push_back({groups.size(), count});
  return groups;
}

struct MatrixSize {
  std::int64_t rows, columns;
};

void expect_double_precision(const Device& device, const GroupedSetup& setup,
                             const std::vector<GemmGroup>& groups) {
  const auto results = run_grouped(device, setup, groups);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto expected = testing::expected_of(setup, groups[g]);
    ASSERT_EQ(results[g].size(), expected.size());
    const auto depth = static_cast<double>(testing::depth_of(setup, groups[g]));
    const bool rounds = results[g][0].dtype() == Dtype::bf16;
    const double tolerance = rounds ? 4e-3 : 1e-6 * std::sqrt(depth + 1.0);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(testing::near(results[g][i], testing::tensor_of(expected[i]), tolerance))
          << setup << ", " << groups[g].rows << " rows, result " << i;
    }
  }
}

// Every form in every dtype, as this setup is otherwise.
template <typename Fn>
void for_each_product(GroupedSetup setup, const Fn& fn) {
  for (const auto form : kForms) {
    for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
      setup.form = form;
      setup.dtype = dtype;
      setup.gradient_dtype = dtype;
      fn(setup);
    }
  }
}

TEST_F(CudaGroupedGemm, EqualsDoublePrecision) {
  const auto groups = groups_of({0, 1, 7, 127, 128, 129, 300, 0});
  for (const MatrixSize size :
       {MatrixSize{8, 20}, {20, 8}, {64, 100}, {100, 64}, {136, 256}, {256, 136}, {1, 33}}) {
    for (const int parts : {1, 2}) {
      for_each_product(
          {.matrix_rows = size.rows, .matrix_columns = size.columns, .parts = parts},
          [&](const GroupedSetup& setup) { expect_double_precision(device, setup, groups); });
    }
  }
}

// Sizes for which there may be kernels of the GPU's own kind, by both.
TEST_F(CudaGroupedGemm, EqualsDoublePrecisionAtRoundSizes) {
  const auto groups = groups_of({0, 5, 128, 200, 513});
  for (const auto kernels : {GemmKernels::best, GemmKernels::portable}) {
    for (const MatrixSize size : {MatrixSize{512, 320}, {256, 64}, {64, 128}}) {
      for (const int parts : {1, 2}) {
        for (const auto form : kForms) {
          expect_double_precision(device,
                                  {.form = form,
                                   .matrix_rows = size.rows,
                                   .matrix_columns = size.columns,
                                   .parts = parts,
                                   .gap = 2,
                                   .kernels = kernels},
                                  groups);
        }
      }
    }
  }
}

TEST_F(CudaGroupedGemm, RowsMatricesAndGroupsApart) {
  const auto groups = groups_of({3, 0, 130, 64});
  for (const std::int64_t spare : {1, 8, 20}) {
    for (const MatrixSize size : {MatrixSize{128, 64}, {72, 200}}) {
      for_each_product(
          {.matrix_rows = size.rows,
           .matrix_columns = size.columns,
           .parts = 2,
           .spare = spare,
           .gap = 5,
           .apart = true},
          [&](const GroupedSetup& setup) { expect_double_precision(device, setup, groups); });
    }
  }
}

TEST_F(CudaGroupedGemm, Biases) {
  const auto groups = groups_of({9, 130, 0, 128, 40});
  for (const MatrixSize size : {MatrixSize{20, 36}, {256, 64}}) {
    for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
      for (const bool has_factors : {false, true}) {
        for (const int parts : {1, 2}) {
          expect_double_precision(device,
                                  {.dtype = dtype,
                                   .matrix_rows = size.rows,
                                   .matrix_columns = size.columns,
                                   .parts = parts,
                                   .has_bias = true,
                                   .has_factors = has_factors,
                                   .gap = 1},
                                  groups);
        }
      }
    }
  }
}

TEST_F(CudaGroupedGemm, GradientsAddedToAndOfF32) {
  const auto groups = groups_of({0, 1, 200, 128, 0});
  for (const MatrixSize size : {MatrixSize{20, 36}, {256, 128}, {72, 200}}) {
    for (const bool accumulate : {false, true}) {
      for (const auto gradient_dtype : {Dtype::f32, Dtype::bf16}) {
        for (const std::int64_t spare : {0, 3, 8}) {
          const GroupedSetup setup{.form = GemmForm::weight_gradient,
                                   .matrix_rows = size.rows,
                                   .matrix_columns = size.columns,
                                   .parts = 2,
                                   .accumulate = accumulate,
                                   .gradient_dtype = gradient_dtype,
                                   .spare = spare,
                                   .gap = 3};
          expect_double_precision(device, setup, groups);
        }
      }
    }
  }
}

TEST_F(CudaGroupedGemm, GroupsWithoutRowsGiveZerosOrNothing) {
  for (const std::int64_t size : {20, 256}) {
    for_each_product({.matrix_rows = size, .matrix_columns = size}, [&](GroupedSetup setup) {
      run_grouped(device, setup, groups_of({0, 0}));
      if (setup.form != GemmForm::weight_gradient) return;
      const auto zero = run_grouped(device, setup, groups_of({0}));
      EXPECT_TRUE(
          testing::same_bits(zero[0][0], Tensor::zeros({size, size}, setup.gradient_dtype)));
      setup.accumulate = true;
      const auto left = run_grouped(device, setup, groups_of({0}));
      EXPECT_TRUE(testing::same_bits(left[0][0], testing::matrix_of(setup, {0, 0}, 0)));
    });
  }
}

void expect_same_bits(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                      const GroupedSetup& setup) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(testing::same_bits(actual[i], expected[i])) << setup;
  }
}

TEST_F(CudaGroupedGemm, BitsDoNotDependOnWhatSurroundsAGroup) {
  const GemmGroup group{.id = 5, .rows = 150};
  for (const MatrixSize size : {MatrixSize{36, 52}, {256, 192}}) {
    const GroupedSetup base{.matrix_rows = size.rows, .matrix_columns = size.columns, .parts = 2};
    for_each_product(base, [&](GroupedSetup setup) {
      setup.has_bias = setup.form == GemmForm::forward;
      const auto alone = run_grouped(device, setup, {group});
      expect_same_bits(run_grouped(device, setup, {group})[0], alone[0], setup);
      const std::vector<GemmGroup> many{{1, 0}, {2, 333}, {3, 1}, group, {4, 77}};
      expect_same_bits(run_grouped(device, setup, many)[3], alone[0], setup);
      setup.gap = 7;
      expect_same_bits(run_grouped(device, setup, many)[3], alone[0], setup);
      setup.apart = true;
      expect_same_bits(run_grouped(device, setup, many)[3], alone[0], setup);
    });
  }
}

// More groups than a warp looks at in one step, and more tiles than blocks.
TEST_F(CudaGroupedGemm, ManyGroups) {
  std::vector<GemmGroup> groups;
  for (std::uint64_t id = 0; id < 1000; ++id) {
    groups.push_back({id, id % 7 == 0 ? 0 : static_cast<std::int64_t>(id * 37 % 150)});
  }
  for (const auto kernels : {GemmKernels::best, GemmKernels::portable}) {
    for_each_product({.matrix_rows = 64, .matrix_columns = 64, .kernels = kernels},
                     [&](const GroupedSetup& setup) {
                       const auto results = run_grouped(device, setup, groups);
                       for (const std::size_t g : {0, 1, 31, 32, 500, 999}) {
                         const auto alone = run_grouped(device, setup, {groups[g]});
                         expect_same_bits(results[g], alone[0], setup);
                       }
                     });
  }
}

// As decoding has them. Hopper's kernel looks at 64 groups at a time, two per lane.
TEST_F(CudaGroupedGemm, FewRowsInManyGroups) {
  std::vector<GemmGroup> groups;
  for (std::uint64_t id = 0; id < 300; ++id) groups.push_back({id, 0});
  for (const auto& [id, rows] :
       {std::pair{3, 1}, {127, 200}, {128, 2}, {129, 130}, {191, 5}, {192, 1}, {297, 64}}) {
    groups[static_cast<std::size_t>(id)].rows = rows;
  }
  for (const auto form : kForms) {
    for (const bool is_scheduled : {false, true}) {
      expect_double_precision(
          device,
          {.form = form, .matrix_rows = 264, .matrix_columns = 136, .is_scheduled = is_scheduled},
          groups);
    }
  }
}

// A cluster of Hopper's kernel takes several of these tiles, each of at least four blocks of the
// reduction: only then does it store a tile behind the next one's products.
TEST_F(CudaGroupedGemm, BitsOfTilesThatAreStoredBehindTheNext) {
  std::vector<GemmGroup> groups;
  for (std::uint64_t id = 0; id < 40; ++id) groups.push_back({id, 700});
  for (const auto form : kForms) {
    for (const int parts : {1, 2}) {
      const GroupedSetup setup{
          .form = form, .matrix_rows = 512, .matrix_columns = 320, .parts = parts};
      const auto results = run_grouped(device, setup, groups);
      for (std::size_t g = 0; g < groups.size(); ++g) {
        const auto alone = run_grouped(device, setup, {groups[g]});
        expect_same_bits(results[g], alone[0], setup);
      }
    }
  }
}

// With tickets or an order of groups, clusters of Hopper's kernels take other tiles.
TEST_F(CudaGroupedGemm, TicketsAndOrderChangeNoBitAndAreLeftZero) {
  std::vector<GemmGroup> groups;
  for (std::uint64_t id = 0; id < 70; ++id) {
    groups.push_back({id, id % 9 == 0 ? 0 : static_cast<std::int64_t>(id * 91 % 600)});
  }
  for (const auto form : kForms) {
    GroupedSetup setup{.form = form, .matrix_rows = 512, .matrix_columns = 320, .parts = 2};
    const auto expected = run_grouped(device, setup, groups);
    setup.is_scheduled = true;
    const auto results = run_grouped(device, setup, groups);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      expect_same_bits(results[g], expected[g], setup);
    }
    expect_same_bits(run_grouped(device, setup, {groups[1]})[0], expected[1], setup);
  }
}

TEST_F(CudaGroupedGemm, GroupsWithMostRowsAreFirst) {
  for (const int count : {1, 40, 300}) {
    std::vector<std::int32_t> rows;
    for (int i = 0; i < count; ++i) rows.push_back(i * 7 % 10);
    std::vector<std::int32_t> expected(rows.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::ranges::stable_sort(expected, std::greater{}, [&](int group) { return rows[group]; });
    const Tensor rows_there = device.copy_of(Tensor::from<std::int32_t>({count}, rows));
    Tensor order = device.copy_of(Tensor::zeros({count}, Dtype::i32));
    cuda::hopper::order_groups(
        {.group_rows = reinterpret_cast<const std::int32_t*>(rows_there.data()), .count = count},
        reinterpret_cast<std::int32_t*>(order.data()), cuda::context_of(device));
    const Tensor result = device.to_host(order);
    EXPECT_TRUE(std::ranges::equal(result.span<std::int32_t>(), expected)) << count << " groups";
  }
}

// Rows that are not aligned are read and written another way, which must not show.
TEST_F(CudaGroupedGemm, BitsDoNotDependOnAlignment) {
  const auto groups = groups_of({130, 0, 9, 300});
  for (const MatrixSize size : {MatrixSize{72, 200}, {256, 128}}) {
    for (const auto kernels : {GemmKernels::best, GemmKernels::portable}) {
      for_each_product({.matrix_rows = size.rows,
                        .matrix_columns = size.columns,
                        .parts = 2,
                        .kernels = kernels},
                       [&](GroupedSetup setup) {
                         const auto aligned = run_grouped(device, setup, groups);
                         for (const std::int64_t spare : {3, 4}) {
                           setup.spare = spare;
                           const auto unaligned = run_grouped(device, setup, groups);
                           for (std::size_t g = 0; g < groups.size(); ++g) {
                             expect_same_bits(unaligned[g], aligned[g], setup);
                           }
                         }
                       });
    }
  }
}

TEST_F(CudaGroupedGemm, NoRowsAndNoAlignment) {
  const GroupedSetup setup{
      .form = GemmForm::weight_gradient, .matrix_rows = 128, .matrix_columns = 64, .spare = 1};
  const auto zero = run_grouped(device, setup, groups_of({0}));
  EXPECT_TRUE(testing::same_bits(zero[0][0], Tensor::zeros({128, 64}, setup.gradient_dtype)));
}

}  // namespace
}  // namespace switchyard::grouped_gemm_test
