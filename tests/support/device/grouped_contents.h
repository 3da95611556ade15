// SPDX-License-Identifier: Apache-2.0
// Rows and matrices for grouped products, and the expected results.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "support/reference/moe_reference.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

enum class GemmForm { forward, input_gradient, weight_gradient };
// The best kernels that fit, or the portable ones.
enum class GemmKernels { best, portable };

struct GroupedSetup {
  GemmForm form = GemmForm::forward;
  Dtype dtype = Dtype::bf16;
  // Sizes of every matrix as stored.
  std::int64_t matrix_rows = 0;
  std::int64_t matrix_columns = 0;
  int parts = 1;
  bool has_bias = false;  // forward: all groups except those with id % 3 == 1
  bool has_factors = false;
  bool accumulate = false;             // weight gradient
  Dtype gradient_dtype = Dtype::bf16;  // weight gradient: `dtype` or f32
  std::int64_t spare = 0;              // NaN elements between rows
  std::int64_t gap = 0;                // NaN rows before each group
  bool apart = false;                  // every matrix has its own allocation
  GemmKernels kernels = GemmKernels::best;
  bool is_scheduled = false;  // with tickets and an order, see cuda::Groups
};
std::ostream& operator<<(std::ostream& out, const GroupedSetup& setup);

// A group's contents depend only on its id and number of rows.
struct GemmGroup {
  std::uint64_t id = 0;
  std::int64_t rows = 0;
};

// Contents with group.rows rows, and for every part a matrix [matrix_rows, matrix_columns] and a
// bias [1, matrix_rows].
Tensor a_of(const GroupedSetup& setup, const GemmGroup& group);
Tensor b_of(const GroupedSetup& setup, const GemmGroup& group);  // weight gradient
Tensor matrix_of(const GroupedSetup& setup, const GemmGroup& group, int part);
bool has_bias(const GroupedSetup& setup, const GemmGroup& group);
Tensor bias_of(const GroupedSetup& setup, const GemmGroup& group, int part);
Tensor factors_of(const GroupedSetup& setup, const GemmGroup& group);

// Columns of a, and of c (of b in a weight gradient).
std::int64_t a_columns(const GroupedSetup& setup);
std::int64_t other_columns(const GroupedSetup& setup);
// Returns the dtype of the matrices, which are results in a weight gradient.
Dtype matrix_dtype(const GroupedSetup& setup);

// Returns the number of terms in one sum.
std::int64_t depth_of(const GroupedSetup& setup, const GemmGroup& group);
// Returns, in double precision, the group's rows of c or the matrices of its parts.
std::vector<Doubles> expected_of(const GroupedSetup& setup, const GemmGroup& group);

}  // namespace switchyard::testing
