// SPDX-License-Identifier: Apache-2.0
// Grouped products: each group of rows is multiplied by its own matrix. The host does not know the
// sizes of the groups.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"
#include "switchyard/tensor.h"

namespace switchyard::cuda {

// Group g is the rows row_offsets[g] … row_offsets[g] + group_rows[g] − 1; only kernels read these
// tables. Rows outside the groups are never written and never affect a result; they may hold NaN.
struct Groups {
  const std::int32_t* row_offsets = nullptr;  // device [≥ count]
  const std::int32_t* group_rows = nullptr;   // device [count]
  int count = 0;
  std::int64_t row_capacity = 0;  // rows in the buffers; no group ends past it
  // Device [2], zero before and after every product. With it, clusters of Hopper's kernels draw
  // their tiles as they go. Null: each cluster's tiles are fixed from the start, as they always
  // are for weight gradients from tokens.
  std::int32_t* tickets = nullptr;
  // Device [count]: the groups in the order in which Hopper's weight gradients compute them. Null:
  // by number.
  const std::int32_t* order = nullptr;
};

// Rows in device memory, `stride` elements apart.
struct Rows {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

// Rows, or tokens that the rows are read from: with `sources`, row r is token sources[r] / top_k.
struct SourceRows : Rows {
  const std::int32_t* sources = nullptr;  // device [R]; null: data holds the rows themselves
  int top_k = 1;
  std::int64_t num_tokens = 0;
};

// One number per row r: data[r], or data[sources[r]] if `sources` is given.
template <typename Float>
struct RowNumbers {
  Float* data = nullptr;                  // device; null: there are no numbers
  const std::int32_t* sources = nullptr;  // device; all different for the rows of the groups
};

// One or two matrices per group (two `parts` are a gate and an up projection), found at
// refs[part · groups + group]. Each is [rows, columns] as stored in memory.
struct GroupMatrices {
  std::span<const MatrixRef> refs;  // host
  int parts = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// All sums are accumulated in f32 and rounded once. The choice of kernel, tile and summation order
// depends only on the matrix sizes, the dtypes and the group's own rows, never on how many groups
// there are, what lies next to them, or how matrices are stored. Offsets are 64-bit throughout.

// c[r, p · N + n] = Σ_k a[r, k] · B_{g,p}[n, k] (+ factor · bias_{g,p}[n]), B [N, K].
struct ForwardGemm {
  Dtype dtype = Dtype::f32;  // dtype of a, B, bias and c
  Groups groups;
  Rows a;                                     // [R, K]
  GroupMatrices b;                            // [N, K]
  Rows c;                                     // out [R, parts · N]
  std::span<const MatrixRef> bias = {};       // host, indexed like b.refs: [N]; null data: no bias
  RowNumbers<const float> bias_factors = {};  // null data: all 1
};

// c[r, n] = Σ_p Σ_k a[r, p · K + k] · B_{g,p}[k, n], B [K, N].
struct InputGradientGemm {
  Dtype dtype = Dtype::f32;  // dtype of a, B and c
  Groups groups;
  Rows a;           // [R, parts · K]
  GroupMatrices b;  // [K, N]
  Rows c;           // out [R, N]
};

// C_{g,p}[m, n] (+)= Σ_r a[r, p · M + m] · b[r, n] over the group's rows in order, C [M, N]. A
// group without rows yields zeros, or leaves C as it is if `accumulate` is set.
struct WeightGradientGemm {
  Dtype dtype = Dtype::f32;  // dtype of a and b
  Groups groups;
  enum class Side { a, b };
  SourceRows a;                // [R, parts · M]; only one part if read from tokens
  SourceRows b;                // [R, N]
  Side narrow = Side::a;       // the side that tiles are narrow along; it may be read from tokens
  GroupMatrices c;             // out [M, N]
  Dtype c_dtype = Dtype::f32;  // dtype, or f32
  bool accumulate = false;     // add to C instead of overwriting it
};

// inner[r, p · I + i] = Σ_k a[r, k] · B_{g,p}[i, k] (+ bias_{g,p}[i]), rounded. Then, from the
// rounded values, activated[r, i] = weight · activation(inner[r]).
struct ActivatedGemm {
  const ExpertsOptions& options;
  Groups groups;
  SourceRows a;     // [R, H]
  GroupMatrices b;  // gate and up [I, H]
  Rows inner;       // out [R, 2I]; null data: not stored
  Rows activated;   // out [R, I]
  RowNumbers<const float> weights = {};
  std::span<const MatrixRef> bias = {};  // host, indexed like b.refs: [I]; null data: no bias
};

// Let d[r, i] = Σ_k a[r, k] · B_g[k, i], rounded. Then activated[r, i] =
// weight · activation(inner[r]), d_weights[r] = ⟨d[r], activation(inner[r])⟩, and inner is
// overwritten with its own gradient.
struct ActivationGradientGemm {
  const ExpertsOptions& options;
  Groups groups;
  SourceRows a;     // [R, H]
  GroupMatrices b;  // down [H, I]
  Rows inner;       // [R, 2I]
  Rows activated;   // out [R, I]
  RowNumbers<const float> weights = {};
  RowNumbers<float> d_weights = {};  // out; computed even without weights, which then count as 1
};

void grouped_gemm(const ForwardGemm& args, Context& context);
void grouped_gemm(const InputGradientGemm& args, Context& context);
void grouped_gemm(const WeightGradientGemm& args, Context& context);

// The same products on Hopper's tensor cores (wgmma, bulk tensor copies), for bf16. They do nothing
// and return false if the sizes or this GPU do not fit.
namespace hopper {
bool grouped_gemm(const ForwardGemm& args, Context& context);
bool grouped_gemm(const InputGradientGemm& args, Context& context);
bool grouped_gemm(const WeightGradientGemm& args, Context& context);
// A product fused with the activation, or with the activation's gradient, in one kernel.
bool grouped_gemm(const ActivatedGemm& args, Context& context);
bool grouped_gemm(const ActivationGradientGemm& args, Context& context);
// True if these kernels take all products of such experts and can read their rows from tokens.
// Depends only on the options, their sizes and the GPU.
bool reads_tokens(const ExpertsOptions& options, const Context& context);
// Writes the groups to `order` (device [count]), those with most rows first: a long group that
// comes last would leave most of the GPU without work.
void order_groups(const Groups& groups, std::int32_t* order, Context& context);
}  // namespace hopper

}  // namespace switchyard::cuda
