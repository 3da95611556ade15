// SPDX-License-Identifier: Apache-2.0
// Products of plain matrices. Large ones use the Hopper grouped kernels where those fit; all others
// use the portable kernel, several per launch.
#include <cuda_bf16.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/kernels.h"
#include "device/cuda/portable/gemm_kernel.cuh"
#include "device/cuda/portable/gemm_walk.cuh"

namespace switchyard::cuda {
namespace {

// Few enough to fit into a kernel's parameters.
constexpr int kProductsAtOnce = 16;

template <typename T>
struct DenseProduct {
  const T* a;
  const T* b;
  void* c;
  std::int64_t a_stride;
  std::int64_t b_stride;
  std::int64_t c_stride;
  int m;
  int n;
  int k;
  int end;  // index after its last tile, counting the tiles of earlier products
  bool c_is_f32;
  bool c_is_aligned;
  bool accumulate;
};

template <typename T, bool kAKMajor, bool kBKMajor>
struct DenseTiles {
  using Element = T;
  using Walk = gemm::NoWalk;

  __device__ bool find(int index, Walk& /*walk*/, gemm::Tile<T>& tile) const {
    int at = 0;
    while (at < count && index >= products[at].end) ++at;
    if (at == count) return false;
    const DenseProduct<T>& product = products[at];
    const auto place = gemm::place_of(index - (at == 0 ? 0 : products[at - 1].end),
                                      gemm::tiles_over(product.m, gemm::kTileRows),
                                      gemm::tiles_over(product.n, gemm::kTileColumns));
    const int row = place.row_block * gemm::kTileRows;
    const int column = place.column_tile * gemm::kTileColumns;
    tile.rows = min(product.m - row, gemm::kTileRows);
    tile.columns = min(product.n - column, gemm::kTileColumns);
    tile.k = product.k;
    tile.a = product.a + row * (kAKMajor ? product.a_stride : 1);
    tile.a_stride = product.a_stride;
    tile.b = product.b + column * (kBKMajor ? product.b_stride : 1);
    tile.b_stride = product.b_stride;
    const std::int64_t place_in_c = row * product.c_stride + column;
    tile.c = static_cast<char*>(product.c) + place_in_c * (product.c_is_f32 ? 4 : sizeof(T));
    tile.c_stride = product.c_stride;
    tile.c_is_f32 = product.c_is_f32;
    tile.c_is_aligned = product.c_is_aligned;
    tile.accumulate = product.accumulate;
    return true;
  }

  DenseProduct<T> products[kProductsAtOnce];
  int count;
};

// The properties that all products of one launch share.
struct Kind {
  Dtype dtype;
  MatrixLayout a_layout;
  MatrixLayout b_layout;
  bool aligned;

  explicit Kind(const Matmul& product)
      : dtype(product.a.dtype()),
        a_layout(product.a_layout),
        b_layout(product.b_layout),
        aligned(gemm::is_aligned(product.a.data(), product.a.row_stride_bytes()) &&
                gemm::is_aligned(product.b.data(), product.b.row_stride_bytes())) {}
  friend bool operator==(const Kind&, const Kind&) = default;
};

std::int64_t depth_of(const Matmul& product) {
  return product.a.shape()[product.a_layout == MatrixLayout::plain ? 1 : 0];
}

// True if c needs no work: it is empty, or nothing would be added to it.
bool is_done(const Matmul& product) {
  return product.c.shape().num_elements() == 0 ||
         (product.mode == GradientMode::accumulate && depth_of(product) == 0);
}

template <typename T>
DenseProduct<T> dense_product(const Matmul& product, int tiles_before) {
  const auto& c = product.c;
  const auto tiles = gemm::num_tiles(c.shape()[0], gemm::kTileRows) *
                     gemm::num_tiles(c.shape()[1], gemm::kTileColumns);
  return {.a = reinterpret_cast<const T*>(product.a.data()),
          .b = reinterpret_cast<const T*>(product.b.data()),
          .c = c.data(),
          .a_stride = product.a.row_stride(),
          .b_stride = product.b.row_stride(),
          .c_stride = c.row_stride(),
          .m = static_cast<int>(c.shape()[0]),
          .n = static_cast<int>(c.shape()[1]),
          .k = static_cast<int>(depth_of(product)),
          .end = tiles_before + static_cast<int>(tiles),
          .c_is_f32 = c.dtype() == Dtype::f32,
          .c_is_aligned = gemm::is_aligned(c.data(), c.row_stride_bytes()),
          .accumulate = product.mode == GradientMode::accumulate};
}

template <typename T, bool kAKMajor, bool kBKMajor>
void launch_products(std::span<const Matmul* const> products, bool aligned, Context& context) {
  DenseTiles<T, kAKMajor, kBKMajor> tiles{};
  int end = 0;
  for (const Matmul* product : products) {
    auto& next = tiles.products[tiles.count++];
    next = dense_product<T>(*product, end);
    end = next.end;
  }
  gemm::launch<kAKMajor, kBKMajor>(tiles, aligned, end, context);
}

template <typename T>
void launch_products(std::span<const Matmul* const> products, const Kind& kind, Context& context) {
  const bool a_k_major = kind.a_layout == MatrixLayout::plain;
  const bool b_k_major = kind.b_layout == MatrixLayout::transposed;
  if (a_k_major && b_k_major) {
    launch_products<T, true, true>(products, kind.aligned, context);
  } else if (a_k_major) {
    launch_products<T, true, false>(products, kind.aligned, context);
  } else if (b_k_major) {
    launch_products<T, false, true>(products, kind.aligned, context);
  } else {
    launch_products<T, false, false>(products, kind.aligned, context);
  }
}

// A single group of all rows of `a`, as stored in memory.
Groups one_group(const Matmul& product, Context& context) {
  const std::array<std::int32_t, 2> words{0, static_cast<std::int32_t>(product.a.rows())};
  const auto* table =
      static_cast<const std::int32_t*>(context.constant(std::as_bytes(std::span(words))));
  return {.row_offsets = table, .group_rows = table + 1, .count = 1, .row_capacity = words[1]};
}

template <typename View>
Rows rows_of(const View& view) {
  return {view.data(), view.row_stride()};
}
template <typename View>
MatrixRef ref_of(const View& view) {
  return {const_cast<std::byte*>(view.data()), view.row_stride()};
}
template <typename View>
GroupMatrices matrices_of(const View& view, const MatrixRef& ref) {
  return {.refs = {&ref, 1}, .rows = view.shape()[0], .columns = view.shape()[1]};
}

template <typename Gemm>
bool multiply_rows_on_hopper(const Matmul& product, Context& context) {
  const auto b = ref_of(product.b);
  return hopper::grouped_gemm(Gemm{.dtype = Dtype::bf16,
                                   .groups = one_group(product, context),
                                   .a = rows_of(product.a),
                                   .b = matrices_of(product.b, b),
                                   .c = rows_of(product.c)},
                              context);
}

bool sum_over_rows_on_hopper(const Matmul& product, Context& context) {
  const auto c = ref_of(product.c);
  return hopper::grouped_gemm(
      WeightGradientGemm{.dtype = Dtype::bf16,
                         .groups = one_group(product, context),
                         .a = {rows_of(product.a)},
                         .b = {rows_of(product.b)},
                         .c = matrices_of(product.c, c),
                         .c_dtype = product.c.dtype(),
                         .accumulate = product.mode == GradientMode::accumulate},
      context);
}

// Runs the grouped product that has these layouts. Returns false if there is none, if it does not
// fit, or if the product is too small to be worth it.
bool multiply_on_hopper(const Matmul& product, Context& context) {
  constexpr std::int64_t kWorthwhile = std::int64_t{1} << 30;
  if (product.a.dtype() != Dtype::bf16 || !context.uses_hopper_kernels()) return false;
  if (product.c.shape().num_elements() * depth_of(product) < kWorthwhile) return false;
  const bool b_is_plain = product.b_layout == MatrixLayout::plain;
  if (product.a_layout == MatrixLayout::transposed) {
    return b_is_plain && sum_over_rows_on_hopper(product, context);
  }
  if (product.c.dtype() != Dtype::bf16 || product.mode == GradientMode::accumulate) return false;
  return b_is_plain ? multiply_rows_on_hopper<InputGradientGemm>(product, context)
                    : multiply_rows_on_hopper<ForwardGemm>(product, context);
}

}  // namespace

void multiply(std::span<const Matmul> products, Context& context) {
  std::array<const Matmul*, kProductsAtOnce> waiting{};
  std::size_t count = 0;
  const auto launch_waiting = [&] {
    if (count == 0) return;
    const Kind kind(*waiting[0]);
    const std::span<const Matmul* const> all(waiting.data(), count);
    if (kind.dtype == Dtype::bf16) {
      launch_products<__nv_bfloat16>(all, kind, context);
    } else {
      launch_products<float>(all, kind, context);
    }
    count = 0;
  };
  for (const Matmul& product : products) {
    if (is_done(product) || multiply_on_hopper(product, context)) continue;
    if (count == waiting.size() || (count > 0 && Kind(product) != Kind(*waiting[0]))) {
      launch_waiting();
    }
    waiting[count++] = &product;
  }
  launch_waiting();
}

}  // namespace switchyard::cuda
