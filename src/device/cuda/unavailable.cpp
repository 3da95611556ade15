// Stands in for CUDA where the build found no toolkit.
#include "device/cuda/probe.h"
#include "switchyard/device.h"
#include "switchyard/error.h"

namespace switchyard::cuda {

std::string toolkit_version() { return ""; }

Feature device_feature() { return {"cuda", false, "this build has no CUDA"}; }

}  // namespace switchyard::cuda

namespace switchyard {

Device Device::cuda(const CudaOptions& /*options*/) { throw Unsupported("this build has no CUDA"); }

}  // namespace switchyard
