// Groups of rows that are those of tokens, and all that the products of experts are given for them.
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
  std::int64_t alignment = 1;  // that groups begin at a multiple of
  std::int64_t top_k = 2;      // K
  ActivationForm form = {};
};
std::ostream& operator<<(std::ostream& out, const FusedSetup& setup);

// A weight gradient: of the inner matrices [I, H] where b is narrow, of the outer ones [H, I] where
// a is.
struct GradientWay {
  cuda::WeightGradientGemm::Side narrow = cuda::WeightGradientGemm::Side::b;
  int parts = 1;
  bool from_tokens = false;
  Dtype dtype = Dtype::bf16;
  bool accumulate = false;
  int group = -1;  // it alone, as if there were no others; −1: all
};
std::ostream& operator<<(std::ostream& out, const GradientWay& way);

// On the host. NaN, or sources that lead nowhere, in rows outside the groups, in tokens that no row
// is of (the first and last are such), and in the weights of assignments without a row.
struct FusedProblem {
  explicit FusedProblem(const FusedSetup& the_setup);

  int num_groups() const { return static_cast<int>(setup.group_rows.size()); }
  std::int64_t capacity() const { return sources.rows(); }
  // A group's rows of what is [R, …].
  ConstTensorView group(int index, const ConstTensorView& rows) const;
  // The rows of all groups, without what is outside.
  Tensor grouped(const ConstTensorView& rows) const;

  StackShape gradient_shape(const GradientWay& way) const;
  // What gradients hold before: to be added to, or NaN.
  Tensor gradients_before(const GradientWay& way) const;
  // In double precision, without what they hold before.
  Doubles expected_gradient(const GradientWay& way, int group, int part) const;

  FusedSetup setup;
  ExpertsOptions options;
  Tensor row_offsets, group_rows;   // [groups]
  std::vector<int> groups_of_rows;  // [R]; −1: in none
  Tensor sources;                   // [R]
  Tensor tokens;                    // [T, H]
  Tensor rows;                      // [R, H]: those tokens
  Tensor token_weights;             // [T · K]
  Tensor row_weights;               // [R]
  Tensor inner;                     // [R, 2I]
  Tensor gate_up;                   // [groups · 2 · I, H]
  Tensor down;                      // [groups · H, I]

 private:
  void lay_out_groups();
  void assign_tokens();
};

// 0 … most rows in every group.
std::vector<std::int32_t> random_groups(int count, std::int64_t most);

// Whole and partial tiles, chunks and lines of either width; 1, 2, 3, 5 and 9 blocks of H; groups
// around the sizes of tiles, in another order each time.
std::vector<FusedSetup> setups_of_all_sizes();
// Groups of which most or the outermost are empty, very many, or large; with gaps, and without.
std::vector<FusedSetup> setups_of_all_groups();

}  // namespace switchyard::testing
