// Groups of rows and matrices for grouped products, and what these should give.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "support/reference/moe_reference.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

enum class GemmForm { forward, input_gradient, weight_gradient };
// By whatever fits, or by the kernels for any GPU.
enum class GemmKernels { best, portable };

struct GroupedSetup {
  GemmForm form = GemmForm::forward;
  Dtype dtype = Dtype::bf16;
  // Of every matrix as it lies in memory.
  std::int64_t matrix_rows = 0;
  std::int64_t matrix_columns = 0;
  int parts = 1;
  bool has_bias = false;  // forward: in all groups but those whose id is 1 modulo 3
  bool has_factors = false;
  bool accumulate = false;             // weight gradient
  Dtype gradient_dtype = Dtype::bf16;  // of a weight gradient: dtype, or f32
  std::int64_t spare = 0;              // elements between rows, of NaN
  std::int64_t gap = 0;                // rows before each group, of NaN
  bool apart = false;                  // every matrix in memory of its own
  GemmKernels kernels = GemmKernels::best;
};
std::ostream& operator<<(std::ostream& out, const GroupedSetup& setup);

// What is in a group depends on its id and rows alone.
struct GemmGroup {
  std::uint64_t id = 0;
  std::int64_t rows = 0;
};

// [group.rows, …], and for every part [matrix_rows, matrix_columns] and [1, matrix_rows].
Tensor a_of(const GroupedSetup& setup, const GemmGroup& group);
Tensor b_of(const GroupedSetup& setup, const GemmGroup& group);  // weight gradient
Tensor matrix_of(const GroupedSetup& setup, const GemmGroup& group, int part);
bool has_bias(const GroupedSetup& setup, const GemmGroup& group);
Tensor bias_of(const GroupedSetup& setup, const GemmGroup& group, int part);
Tensor factors_of(const GroupedSetup& setup, const GemmGroup& group);

// Columns of a, and of c (or b in a weight gradient).
std::int64_t a_columns(const GroupedSetup& setup);
std::int64_t other_columns(const GroupedSetup& setup);
// Of matrices: in a weight gradient they are results.
Dtype matrix_dtype(const GroupedSetup& setup);

// Terms of one sum.
std::int64_t depth_of(const GroupedSetup& setup, const GemmGroup& group);
// In double precision: the group's rows of c, or the matrices of its parts.
std::vector<Doubles> expected_of(const GroupedSetup& setup, const GemmGroup& group);

}  // namespace switchyard::testing
