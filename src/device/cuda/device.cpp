// A GPU by name: the same whether the build has CUDA or not.
#include "switchyard/device.h"

#include "device/cuda/probe.h"

namespace switchyard {

Device Device::cuda(const CudaOptions& options) { return Device(cuda::make_device(options)); }

}  // namespace switchyard
