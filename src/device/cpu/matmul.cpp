#include "device/cpu/matmul.h"

#include <algorithm>
#include <vector>

#include "device/cpu/gemm.h"
#include "device/cpu/panel_rows.h"
#include "device/cpu/panels.h"

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

// Rows of c that one task makes: by sizes alone, and so many that packing b for them costs little.
std::int64_t rows_of_task(const Sizes& sizes) {
  constexpr std::int64_t kProductsOfTask = std::int64_t{1} << 23;
  constexpr std::int64_t kLeastRows = 64;
  const auto most = std::clamp(kProductsOfTask / std::max<std::int64_t>(sizes.n * sizes.k, 1),
                               kLeastRows, kMostPanelRows);
  return round_up(ceil_div(sizes.m, ceil_div(sizes.m, most)), 16);
}

Layout layout_of(MatrixLayout layout) {
  return layout == MatrixLayout::plain ? Layout::plain : Layout::transposed;
}

// Rows first … first + rows_of_task − 1 of c.
void multiply_rows(const Matmul& product, std::int64_t first, Scratch& scratch) {
  const auto sizes = sizes_of(product);
  const auto& a = product.a;
  const bool is_plain = product.a_layout == MatrixLayout::plain;
  gemm({.m = std::min(rows_of_task(sizes), sizes.m - first),
        .n = sizes.n,
        .k = sizes.k,
        .dtype = a.dtype(),
        .a = {is_plain ? a.row(first) : a.data() + first * size_of(a.dtype()), a.row_stride(),
              layout_of(product.a_layout)},
        .b = in(product.b, layout_of(product.b_layout)),
        .c = {product.c.row(first), product.c.row_stride(), product.c.dtype()},
        .accumulate = product.mode == GradientMode::accumulate},
       scratch);
}

}  // namespace

void multiply(std::span<const Matmul> products, Workers& workers) {
  std::vector<std::int64_t> task_offsets{0};  // [products + 1]
  task_offsets.reserve(products.size() + 1);
  for (const Matmul& product : products) {
    const auto sizes = sizes_of(product);
    const auto tasks = sizes.m == 0 || sizes.n == 0 ? 0 : ceil_div(sizes.m, rows_of_task(sizes));
    task_offsets.push_back(task_offsets.back() + tasks);
  }
  workers.run(task_offsets.back(), [&](std::int64_t task, Scratch& scratch) {
    const auto after = std::upper_bound(task_offsets.begin(), task_offsets.end(), task);
    const Matmul& product = products[static_cast<std::size_t>(after - task_offsets.begin() - 1)];
    multiply_rows(product, (task - *(after - 1)) * rows_of_task(sizes_of(product)), scratch);
  });
}

}  // namespace switchyard::cpu
