// Products of groups of rows with a matrix a group, whose sizes the host does not know.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"
#include "switchyard/tensor.h"

namespace switchyard::cuda {

// Group g has the rows row_offsets[g] … row_offsets[g] + group_rows[g] − 1: read by kernels alone.
// Other rows are neither read in a way that shows, nor written; they may hold NaN.
struct Groups {
  const std::int32_t* row_offsets = nullptr;  // device [≥ count]
  const std::int32_t* group_rows = nullptr;   // device [count]
  int count = 0;
  std::int64_t row_capacity = 0;  // rows of the buffers: no group ends beyond it
};

// Rows in device memory; `stride` elements apart.
struct Rows {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

// Rows, or tokens that rows are read from: row r is then token sources[r] / top_k.
struct SourceRows : Rows {
  const std::int32_t* sources = nullptr;  // device [R]; none: rows
  int top_k = 1;
  std::int64_t num_tokens = 0;
};

// A number for every row r: that of r, or of sources[r].
template <typename Float>
struct RowNumbers {
  Float* data = nullptr;                  // device; none: there are no numbers
  const std::int32_t* sources = nullptr;  // of the rows of groups each another one
};

// One or two matrices a group (`parts`: a gate and an up projection), each [rows, columns] as it
// lies in memory, of `dtype`: refs[part · groups + group].
struct GroupMatrices {
  std::span<const MatrixRef> refs;  // host
  int parts = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// All sums are made in f32 and rounded once. Which kernel, tile and order of sums is used depends
// on the sizes of matrices, dtypes and the group's own rows alone: never on how many groups there
// are, what lies beside them, or how matrices are stored. 64-bit offsets throughout.

// c[r, p · N + n] = Σ_k a[r, k] · B_{g,p}[n, k] (+ factor · bias_{g,p}[n]), B [N, K].
struct ForwardGemm {
  Dtype dtype = Dtype::f32;  // of a, B, bias and c
  Groups groups;
  Rows a;                                // [R, K]
  GroupMatrices b;                       // [N, K]
  Rows c;                                // out [R, parts · N]
  std::span<const MatrixRef> bias = {};  // host, as b.refs: [N], data null where there is none
  const float* bias_factors = nullptr;   // device [R] or none: 1
};

// c[r, n] = Σ_p Σ_k a[r, p · K + k] · B_{g,p}[k, n], B [K, N].
struct InputGradientGemm {
  Dtype dtype = Dtype::f32;  // of a, B and c
  Groups groups;
  Rows a;           // [R, parts · K]
  GroupMatrices b;  // [K, N]
  Rows c;           // out [R, N]
};

// C_{g,p}[m, n] (+)= Σ_r a[r, p · M + m] · b[r, n] over the group's rows in order, C [M, N]. A
// group without rows gives zeros, or nothing to add.
struct WeightGradientGemm {
  Dtype dtype = Dtype::f32;  // of a and b
  Groups groups;
  enum class Side { a, b };
  SourceRows a;                // [R, parts · M]; from tokens one part
  SourceRows b;                // [R, N]
  Side narrow = Side::a;       // which may be read from tokens, and tiles are narrow along
  GroupMatrices c;             // out [M, N]
  Dtype c_dtype = Dtype::f32;  // dtype, or f32
  bool accumulate = false;     // to what is there, rather than overwrite it
};

// inner[r, p · I + i] = Σ_k a[r, k] · B_{g,p}[i, k], rounded; from that
// activated[r, i] = weight · activation(inner[r]).
struct ActivatedGemm {
  const ExpertsOptions& options;
  Groups groups;
  SourceRows a;     // [R, H]
  GroupMatrices b;  // gate and up [I, H]
  Rows inner;       // out [R, 2I], or no data: not kept
  Rows activated;   // out [R, I]
  RowNumbers<const float> weights = {};
};

// With d = Σ_k a[r, k] · B_g[k, i], rounded: inner becomes its own gradient,
// activated[r, i] = weight · activation(inner[r]), d_weights[r] = ⟨d, activation(inner[r])⟩.
struct ActivationGradientGemm {
  const ExpertsOptions& options;
  Groups groups;
  SourceRows a;     // [R, H]
  GroupMatrices b;  // down [H, I]
  Rows inner;       // [R, 2I]
  Rows activated;   // out [R, I]
  RowNumbers<const float> weights = {};
  RowNumbers<float> d_weights = {};  // out; also without weights, which are then 1
};

void grouped_gemm(const ForwardGemm& args, Context& context);
void grouped_gemm(const InputGradientGemm& args, Context& context);
void grouped_gemm(const WeightGradientGemm& args, Context& context);

// The same by the tensor cores of Hopper (wgmma, bulk tensor copies), for bf16; false where the
// sizes or this GPU do not fit, and then nothing is done.
namespace hopper {
bool grouped_gemm(const ForwardGemm& args, Context& context);
bool grouped_gemm(const InputGradientGemm& args, Context& context);
bool grouped_gemm(const WeightGradientGemm& args, Context& context);
// The same products, and what is done with them, in one kernel.
bool grouped_gemm(const ActivatedGemm& args, Context& context);
bool grouped_gemm(const ActivationGradientGemm& args, Context& context);
// Whether all products of such experts are taken, and read their rows from tokens: by options and
// sizes alone.
bool reads_tokens(const ExpertsOptions& options, const Context& context);
}  // namespace hopper

}  // namespace switchyard::cuda
