// SPDX-License-Identifier: Apache-2.0
// Matrix products without a library: correct but slow.
#include <algorithm>
#include <vector>

#include "device/cpu/gemm/gemm_library.h"

namespace switchyard::cpu {

void gemm_f32(const Gemm& args) {
  const auto* a = reinterpret_cast<const float*>(args.a.data);
  const auto* b = reinterpret_cast<const float*>(args.b.data);
  auto* c = reinterpret_cast<float*>(args.c.data);
  const bool a_plain = args.a.layout == Layout::plain;
  const bool b_plain = args.b.layout == Layout::plain;
  std::vector<float> sums(static_cast<std::size_t>(args.n));
  for (std::int64_t i = 0; i < args.m; ++i) {
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (std::int64_t l = 0; l < args.k; ++l) {
      const float factor = a_plain ? a[i * args.a.stride + l] : a[l * args.a.stride + i];
      const float* b_row = b_plain ? b + l * args.b.stride : b + l;
      const std::int64_t step = b_plain ? 1 : args.b.stride;
      for (std::int64_t j = 0; j < args.n; ++j) {
        sums[static_cast<std::size_t>(j)] += factor * b_row[j * step];
      }
    }
    // The old value is added once, at the end, as libraries do: accumulating the same gradient
    // twice then gives exactly twice the gradient.
    float* row = c + i * args.c.stride;
    for (std::int64_t j = 0; j < args.n; ++j) {
      const float sum = sums[static_cast<std::size_t>(j)];
      row[j] = args.accumulate ? row[j] + sum : sum;
    }
  }
}

bool has_bf16_units() { return false; }
void gemm_bf16(const Gemm& /*args*/) {}

int max_gemm_threads() { return 1; }
void set_gemm_threads(int /*num_threads*/) {}

const char* gemm_library() { return "plain loops"; }
std::string gemm_numerics() { return gemm_library(); }

}  // namespace switchyard::cpu
