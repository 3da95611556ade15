// What a GPU reaches on its own: a plain copy, and one dense product by its vendor's library.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bench/cool_and_hot.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

// Seconds that one call of `work`, which only fills the stream (a cudaStream_t), takes the GPU; hot
// is the median of eleven.
CoolAndHot time_on_gpu(void* stream, const std::function<void()>& work);

// Bytes read and written a second by a copy within a GPU's memory, timed by `timer`: where that is
// time_on_ranks, all ranks copy at once, and this is the part of one.
CoolAndHot copy_ceiling(void* stream, int ordinal, const Timer& timer);

struct DenseProduct {
  std::int64_t m = 0, n = 0, k = 0;
  Dtype dtype = Dtype::bf16;
};
// FLOP/s of one product [m, k] · [n, k]ᵀ by cuBLAS; zeros, and the reason, where it is not there.
CoolAndHot gemm_ceiling(void* stream, const DenseProduct& product, std::string& reason);

}  // namespace switchyard::cli
