// What the grouped GEMM kernels of Hopper are told.
#pragma once

#include <cstdint>

#include "device/cuda/hopper/tensor_maps.h"

namespace switchyard::cuda::hopper {

// The three products of grouped_gemm.h.
enum class Product { forward, input_gradient, weight_gradient };

// How sums leave: rounded, and stored behind the next tile's first products; or at once from
// registers, slower, for what is more than rounding.
enum class Epilogue { deferred, direct_bf16, direct_f32 };

// A tile of c is 128 × 256; the reduction goes in blocks of 64.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kBlock = 64;

// Parts do not share a tile, nor a block of the reduction.
struct KernelArgs {
  CUtensorMap a{};  // forward [R, K], input gradient [parts, R, K], weight gradient [parts, R, M]
  MatrixMaps b;     // the matrices, or [R, N]
  MatrixMaps c;     // [parts, R, N], or the matrices; not for direct epilogues
  const std::int32_t* row_offsets = nullptr;
  const std::int32_t* group_rows = nullptr;
  int groups = 0;
  int part_blocks = 0;    // a part's column tiles, blocks of the reduction, or row tiles
  int column_blocks = 0;  // column tiles of all parts
  int row_blocks = 0;     // row tiles of all parts; weight gradient alone
  int k_blocks = 0;       // of all parts; not for the weight gradient
  int rows = 0;           // M; weight gradient alone
  int columns = 0;        // N
  Rows c_rows;            // not for the weight gradient
  const MatrixRef* c_matrices = nullptr;  // direct weight gradients alone
  bool c_has_pairs = true;                // direct epilogues alone: as has_pairs
  bool accumulate = false;
  const MatrixRef* bias = nullptr;
  const float* bias_factors = nullptr;
};

}  // namespace switchyard::cuda::hopper
