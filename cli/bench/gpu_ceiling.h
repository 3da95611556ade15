// SPDX-License-Identifier: Apache-2.0
// The speed that a GPU reaches on its own, for a plain copy and for one dense cuBLAS product.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bench/cool_and_hot.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

// Returns the seconds that one call of `work` takes on the GPU; hot is the median of eleven. `work`
// only enqueues onto the stream (a cudaStream_t).
CoolAndHot time_on_gpu(void* stream, const std::function<void()>& work);

// Returns the bytes that a copy within GPU memory reads and writes per second, timed by `timer`. If
// that is time_on_ranks, all ranks copy at once and this is the rate of one.
CoolAndHot copy_ceiling(void* stream, int ordinal, const Timer& timer);

struct DenseProduct {
  std::int64_t m = 0, n = 0, k = 0;
  Dtype dtype = Dtype::bf16;
};
// Returns the FLOP/s of one product [m, k] · [n, k]ᵀ with cuBLAS. If cuBLAS is not available,
// returns zeros and sets `reason`.
CoolAndHot gemm_ceiling(void* stream, const DenseProduct& product, std::string& reason);

}  // namespace switchyard::cli
