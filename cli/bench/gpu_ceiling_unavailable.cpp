// SPDX-License-Identifier: Apache-2.0
// Replaces the GPU ceilings in a build without CUDA, where there is no device to measure.
#include "bench/gpu_ceiling.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

[[noreturn]] void refuse() { throw Unsupported("this build has no CUDA"); }

}  // namespace

CoolAndHot time_on_gpu(void* /*stream*/, const std::function<void()>& /*work*/) { refuse(); }
CoolAndHot copy_ceiling(void* /*stream*/, int /*ordinal*/, const Timer& /*timer*/) { refuse(); }
CoolAndHot gemm_ceiling(void* /*stream*/, const DenseProduct& /*product*/,
                        std::string& /*reason*/) {
  refuse();
}

}  // namespace switchyard::cli
