// SPDX-License-Identifier: Apache-2.0
// Kernels for single rows. One source is compiled for every instruction set, with equal bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace switchyard::cpu {

// Whether stores bypass the caches. For data larger than the caches, a plain store would first read
// the line that it overwrites.
enum class Stores : bool { cached, streaming };

// The rows to add up, and the rows of a later sum to prefetch meanwhile. Rows may be anywhere, so
// the hardware cannot predict them.
struct SumTerms {
  const std::byte* const* rows = nullptr;
  const float* weights = nullptr;  // may be null
  int count = 0;                   // may be 0
  const std::byte* const* later_rows = nullptr;
  int later_count = 0;
};

// Elements are `float` or the bits of bf16. `streaming` requires rows that begin and end at cache
// line boundaries, and publish() must be called before another thread reads them.
struct RowKernels {
  const char* name;

  // Writes one row to `count` places.
  void (*copy)(std::byte* const* to, int count, const std::byte* from, std::int64_t bytes,
               Stores stores);

  struct Typed {
    // to[c] = scale[c] · from
    void (*scale)(std::byte* const* to, const float* scale, int count, const std::byte* from,
                  std::int64_t elements, Stores stores);
    // to = Σ_c [weights[c] ·] from[c]
    void (*sum)(std::byte* to, const SumTerms& terms, std::int64_t elements, Stores stores);
    float (*dot)(const std::byte* a, const std::byte* b, std::int64_t elements);
  };
  Typed f32;
  Typed bf16;

  void (*publish)();
};

extern const RowKernels kRowKernels_baseline;
extern const RowKernels kRowKernels_avx2;
extern const RowKernels kRowKernels_avx512;

// Returns the variants that this CPU can run, the best one last.
std::vector<const RowKernels*> row_kernels_of_this_cpu();
// Returns the best variant for this CPU.
const RowKernels& row_kernels();

}  // namespace switchyard::cpu
