// SPDX-License-Identifier: Apache-2.0
// Selects the variants of the kernels that this CPU can run.
#include <vector>

#include "device/cpu/simd/element_kernels.h"
#include "device/cpu/simd/row_kernels.h"

namespace switchyard::cpu {
namespace {

// Returns the variants whose instruction set this CPU has, the best one last.
template <typename Kernels>
std::vector<const Kernels*> runnable(const Kernels& baseline, const Kernels& avx2,
                                     const Kernels& avx512) {
  std::vector<const Kernels*> kernels{&baseline};
  if (__builtin_cpu_supports("avx2")) kernels.push_back(&avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&avx512);
  }
  return kernels;
}

}  // namespace

std::vector<const RowKernels*> row_kernels_of_this_cpu() {
#if defined(__x86_64__)
  return runnable(kRowKernels_baseline, kRowKernels_avx2, kRowKernels_avx512);
#else
  return {&kRowKernels_baseline};
#endif
}

const RowKernels& row_kernels() {
  static const RowKernels& best = *row_kernels_of_this_cpu().back();
  return best;
}

std::vector<const ElementKernels*> element_kernels_of_this_cpu() {
#if defined(__x86_64__)
  return runnable(kElementKernels_baseline, kElementKernels_avx2, kElementKernels_avx512);
#else
  return {&kElementKernels_baseline};
#endif
}

const ElementKernels& element_kernels() {
  static const ElementKernels& best = *element_kernels_of_this_cpu().back();
  return best;
}

}  // namespace switchyard::cpu
