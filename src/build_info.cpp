// SPDX-License-Identifier: Apache-2.0
// Provides the information that `switchyard info` prints.
#include "switchyard/build_info.h"

#include <thread>

#include "build_config.h"
#include "core/require.h"
#include "device/cpu/gemm/gemm.h"
#include "device/cpu/simd/row_kernels.h"
#include "device/cuda/runtime/probe.h"

#if SWITCHYARD_HAS_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

namespace switchyard {
namespace {

Feature onednn_feature() {
#if SWITCHYARD_HAS_ONEDNN
  const dnnl_version_t* v = dnnl_version();
  return {"oneDNN", true, fmt::format("{}.{}.{}", v->major, v->minor, v->patch)};
#else
  return {"oneDNN", false, "not found when this was built (libdnnl-dev); products are slow"};
#endif
}

}  // namespace

std::string_view version() { return SWITCHYARD_VERSION; }

std::string cpu_numerics() { return cpu::gemm_numerics(); }

std::vector<Feature> build_features() {
  return {
      {"compiler", true, SWITCHYARD_COMPILER ", " SWITCHYARD_BUILD_TYPE},
      {"MPI", SWITCHYARD_HAS_MPI != 0,
       SWITCHYARD_HAS_MPI != 0 ? "built in"
                               : "not found when this was built (libopenmpi-dev, openmpi-bin)"},
      onednn_feature(),
      {"CUDA", SWITCHYARD_HAS_CUDA != 0,
       SWITCHYARD_HAS_CUDA != 0 ? cuda::toolkit_version()
                                : "not found when this was built (the CUDA toolkit)"},
  };
}

std::vector<Feature> devices() {
  return {
      {"cpu", true,
       fmt::format("{} hardware threads, kernels for {}, products by {}",
                   std::thread::hardware_concurrency(), cpu::row_kernels().name,
                   cpu::gemm_library())},
      cuda::device_feature(),
  };
}

std::vector<Gpu> gpus() { return cuda::gpus(); }

}  // namespace switchyard
