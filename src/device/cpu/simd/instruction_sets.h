// Which variants of the kernels this CPU can run.
#pragma once

#include <vector>

namespace switchyard::cpu {

// Of the variants for each instruction set, those this CPU has, the best last.
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

}  // namespace switchyard::cpu
