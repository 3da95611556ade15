// SPDX-License-Identifier: Apache-2.0
// A build without oneDNN has no library to compare with.
#include "bench/cpu_ceiling.h"

namespace switchyard::cli {

struct GemmCeiling::Data {};

bool has_gemm_ceiling() { return false; }
GemmCeiling::GemmCeiling(const CeilingOptions& /*options*/) {}
GemmCeiling::~GemmCeiling() = default;
double GemmCeiling::independent(Communicator& /*comm*/) { return 0.0; }
double GemmCeiling::threaded(Communicator& /*comm*/) { return 0.0; }

}  // namespace switchyard::cli
