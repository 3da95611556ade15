// What is done with single rows. One source gives these for every instruction set, with equal bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace switchyard::cpu {

// Whether rows are written past the caches. For data larger than the caches a plain store would
// first read what it overwrites.
enum class Stores : bool { cached, streaming };

// The rows that are added up, and those of a later sum: rows lie anywhere, and what the hardware
// cannot foresee is fetched while this sum is made.
struct SumTerms {
  const std::byte* const* rows = nullptr;
  const float* weights = nullptr;  // or null
  int count = 0;                   // may be 0
  const std::byte* const* later_rows = nullptr;
  int later_count = 0;
};

// Elements are `float` (F32) or the bits of bf16. `streaming` needs rows that begin and end on
// cache lines; publish() must follow before another thread reads them.
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

// Those that this CPU can run, the best last.
std::vector<const RowKernels*> row_kernels_of_this_cpu();
// The best of them.
const RowKernels& row_kernels();

}  // namespace switchyard::cpu
