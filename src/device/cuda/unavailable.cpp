// Stands in for the CUDA probe where the build found no toolkit.
#include "device/cuda/probe.h"

namespace switchyard::cuda {

std::string toolkit_version() { return ""; }

Feature device_feature() { return {"cuda", false, "this build has no CUDA"}; }

}  // namespace switchyard::cuda
