// SPDX-License-Identifier: Apache-2.0
// Selects the kernel for a product. Computes bf16 products in f32 if the CPU has no bf16 units.
#include "device/cpu/gemm/gemm.h"

#include <cstring>

#include "device/cpu/gemm/gemm_library.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

// Returns a contiguous copy in f32.
MatrixIn widened(const MatrixIn& from, std::int64_t rows, std::int64_t columns, Scratch& scratch) {
  if (from.layout == Layout::transposed) std::swap(rows, columns);
  float* to = scratch.take_floats(rows * columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    element_kernels().widen(to + r * columns, from.data + r * from.stride * size_of(Dtype::bf16),
                            columns);
  }
  return {reinterpret_cast<const std::byte*>(to), columns, from.layout};
}

void gemm_widened(const Gemm& args, Scratch& scratch) {
  const auto mark = scratch.mark();
  Gemm wide = args;
  wide.dtype = Dtype::f32;
  wide.a = widened(args.a, args.m, args.k, scratch);
  wide.b = widened(args.b, args.k, args.n, scratch);
  if (args.c.dtype == Dtype::f32) {
    gemm_f32(wide);
  } else {
    float* sums = scratch.take_floats(args.m * args.n);
    wide.c = {reinterpret_cast<std::byte*>(sums), args.n, Dtype::f32};
    const auto row_of_c = [&](std::int64_t r) {
      return args.c.data + r * args.c.stride * size_of(Dtype::bf16);
    };
    if (args.accumulate) {
      for (std::int64_t r = 0; r < args.m; ++r) {
        element_kernels().widen(sums + r * args.n, row_of_c(r), args.n);
      }
    }
    gemm_f32(wide);
    for (std::int64_t r = 0; r < args.m; ++r) {
      element_kernels().narrow(row_of_c(r), sums + r * args.n, args.n);
    }
  }
  scratch.release(mark);
}

}  // namespace

void gemm(const Gemm& args, Scratch& scratch) {
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) {
    if (args.accumulate) return;
    for (std::int64_t r = 0; r < args.m; ++r) {
      std::memset(args.c.data + r * args.c.stride * size_of(args.c.dtype), 0,
                  static_cast<std::size_t>(args.n * size_of(args.c.dtype)));
    }
    return;
  }
  if (args.dtype == Dtype::f32) {
    gemm_f32(args);
  } else if (has_bf16_units()) {
    gemm_bf16(args);
  } else {
    gemm_widened(args, scratch);
  }
}

SingleThreaded::SingleThreaded() : threads_before_(max_gemm_threads()) { set_gemm_threads(1); }
SingleThreaded::~SingleThreaded() { set_gemm_threads(threads_before_); }

}  // namespace switchyard::cpu
