// What a GPU reaches on its own: a plain copy, and one dense product by its vendor's library.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard::cli {

// Medians, taken as bench/gpu_timing.py takes them. A GPU that was idle runs faster than one that
// is hot: a figure is compared with a ceiling of the same heat.
struct CoolAndHot {
  double cool = 0.0;  // in five bursts of at most 20 ms or one round, each after a pause
  double hot = 0.0;   // eleven rounds after a third of a second of the same work
};

// Seconds that one call of `work`, which only fills the stream (a cudaStream_t), takes the GPU.
CoolAndHot time_on_gpu(void* stream, const std::function<void()>& work);

// Bytes read and written a second by a copy within the GPU's memory.
CoolAndHot copy_ceiling(void* stream);

struct DenseProduct {
  std::int64_t m = 0, n = 0, k = 0;
  Dtype dtype = Dtype::bf16;
};
// FLOP/s of one product [m, k] · [n, k]ᵀ by cuBLAS; zeros, and the reason, where it is not there.
CoolAndHot gemm_ceiling(void* stream, const DenseProduct& product, std::string& reason);

}  // namespace switchyard::cli
