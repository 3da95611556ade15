// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU.
#include <algorithm>
#include <utility>
#include <vector>

#include "device/cpu/experts/panels.h"
#include "device/cpu/gemm/gemm.h"
#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

struct Sizes {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

Sizes sizes_of(const Matmul& product) {
  return {.m = product.c.shape()[0],
          .n = product.c.shape()[1],
          .k = product.a.shape()[product.a_layout == MatrixLayout::plain ? 1 : 0]};
}

// Returns the size of nearly equal parts of n: at most `most`, then rounded up to a multiple of 16.
std::int64_t even_part(std::int64_t n, std::int64_t most) {
  return round_up(ceil_div(n, ceil_div(n, most)), 16);
}

// The tile of c that one task computes, chosen by the sizes alone. Taller tiles pack b less often.
// If there would be few tasks, tiles with a large k get fewer rows.
struct Tile {
  explicit Tile(const Sizes& sizes) {
    constexpr std::int64_t kMostColumns = 512;
    constexpr std::int64_t kLeastRows = 64;
    constexpr std::int64_t kFewTasks = 8;
    constexpr std::int64_t kProductsOfTask = std::int64_t{1} << 23;
    if (sizes.m == 0 || sizes.n == 0) return;
    columns = even_part(sizes.n, kMostColumns);
    num_across = ceil_div(sizes.n, columns);
    auto most_rows = kMostPanelRows;
    if (ceil_div(sizes.m, most_rows) * num_across < kFewTasks) {
      const auto of_row = std::max<std::int64_t>(columns * sizes.k, 1);
      most_rows = std::clamp(kProductsOfTask / of_row, kLeastRows, most_rows);
    }
    rows = even_part(sizes.m, most_rows);
    num_down = ceil_div(sizes.m, rows);
  }

  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t num_down = 0;  // 0 if c has no elements
  std::int64_t num_across = 1;
};

Layout layout_of(MatrixLayout layout) {
  return layout == MatrixLayout::plain ? Layout::plain : Layout::transposed;
}

// Returns the matrix from this row and column on, counted in the logical matrix.
MatrixIn from(const ConstTensorView& view, MatrixLayout layout, std::int64_t row,
              std::int64_t column) {
  if (layout == MatrixLayout::transposed) std::swap(row, column);
  return {view.row(row) + column * size_of(view.dtype()), view.row_stride(), layout_of(layout)};
}

void multiply_tile(const Matmul& product, std::int64_t index, Scratch& scratch) {
  const auto sizes = sizes_of(product);
  const Tile tile(sizes);
  const auto row = index / tile.num_across * tile.rows;
  const auto column = index % tile.num_across * tile.columns;
  gemm({.m = std::min(tile.rows, sizes.m - row),
        .n = std::min(tile.columns, sizes.n - column),
        .k = sizes.k,
        .dtype = product.a.dtype(),
        .a = from(product.a, product.a_layout, row, 0),
        .b = from(product.b, product.b_layout, 0, column),
        .c = {product.c.row(row) + column * size_of(product.c.dtype()), product.c.row_stride(),
              product.c.dtype()},
        .accumulate = product.mode == GradientMode::accumulate},
       scratch);
}

}  // namespace

void multiply(std::span<const Matmul> products, Workers& workers) {
  std::vector<std::int64_t> task_offsets{0};  // [products + 1]
  task_offsets.reserve(products.size() + 1);
  for (const Matmul& product : products) {
    const Tile tile(sizes_of(product));
    task_offsets.push_back(task_offsets.back() + tile.num_down * tile.num_across);
  }
  workers.run(task_offsets.back(), [&](std::int64_t task, Scratch& scratch) {
    const auto after = std::upper_bound(task_offsets.begin(), task_offsets.end(), task);
    const Matmul& product = products[static_cast<std::size_t>(after - task_offsets.begin() - 1)];
    multiply_tile(product, task - *(after - 1), scratch);
  });
}

}  // namespace switchyard::cpu
