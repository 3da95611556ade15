// SPDX-License-Identifier: Apache-2.0
// Groups of rows that come from tokens, with all inputs of the experts' products.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "device/cuda/grouped_gemm.h"
#include "support/activation_forms.h"
#include "support/device/apart_rows.h"
#include "support/reference/moe_reference.h"
#include "switchyard/experts.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

struct FusedSetup {
  std::int64_t intermediate = 0;  // I
  std::int64_t hidden = 0;        // H
  std::vector<std::int32_t> group_rows = {};
  std::int64_t alignment = 1;  // groups start at multiples of it
  std::int64_t top_k = 2;      // K
  ActivationForm form = {};
};
std::ostream& operator<<(std::ostream& out, const FusedSetup& setup);

// A weight gradient: of the inner matrices [I, H] if b is narrow, of the outer ones [H, I] if a is.
struct GradientWay {
  cuda::WeightGradientGemm::Side narrow = cuda::WeightGradientGemm::Side::b;
  int parts = 1;
  bool from_tokens = false;
  Dtype dtype = Dtype::bf16;
  bool accumulate = false;
  int group = -1;  // runs only this group, as if there were no others; −1: all
};
std::ostream& operator<<(std::ostream& out, const GradientWay& way);

// Inputs on the host. Rows outside the groups, tokens without a row (always including the first and
// last) and weights of assignments without a row are NaN; sources of rows outside the groups are
// invalid.
struct FusedProblem {
  explicit FusedProblem(const FusedSetup& the_setup);

  int num_groups() const { return static_cast<int>(setup.group_rows.size()); }
  std::int64_t capacity() const { return sources.rows(); }
  // Returns one group's slice of a tensor [R, …].
  ConstTensorView group(int index, const ConstTensorView& rows) const;
  // Returns the rows of all groups, without those outside.
  Tensor grouped(const ConstTensorView& rows) const;

  StackShape gradient_shape(const GradientWay& way) const;
  // Returns the initial contents of the gradients: values to add to, or NaN.
  Tensor gradients_before(const GradientWay& way) const;
  // Returns the gradient in double precision, without the initial contents.
  Doubles expected_gradient(const GradientWay& way, int group, int part) const;

  FusedSetup setup;
  ExpertsOptions options;
  Tensor row_offsets, group_rows;   // [groups]
  std::vector<int> groups_of_rows;  // [R]; −1: in no group
  Tensor sources;                   // [R]
  Tensor tokens;                    // [T, H]
  Tensor rows;                      // [R, H]: the tokens of the rows
  Tensor token_weights;             // [T · K]
  Tensor row_weights;               // [R]
  Tensor inner;                     // [R, 2I]
  Tensor gate_up;                   // [groups · 2 · I, H]
  Tensor down;                      // [groups · H, I]

 private:
  void lay_out_groups();
  void assign_tokens();
};

// Returns 0 … most rows for every group.
std::vector<std::int32_t> random_groups(int count, std::int64_t most);

// Covers whole and partial tiles, chunks and lines of either width; 1, 2, 3, 5 and 9 blocks of H;
// group sizes around the tile sizes, in a different order each time.
std::vector<FusedSetup> setups_of_all_sizes();
// Covers setups in which most groups or the outermost ones are empty, with very many groups, and
// with large ones; each with and without gaps.
std::vector<FusedSetup> setups_of_all_groups();

}  // namespace switchyard::testing
