// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA where the build found no toolkit.
#include "device/cuda/runtime/probe.h"
#include "switchyard/captured_graph.h"
#include "switchyard/error.h"

namespace switchyard::cuda {

std::string toolkit_version() { return ""; }

std::string reason_against(int /*ordinal*/) { return "this build has no CUDA"; }

Feature device_feature() { return {"cuda", false, reason_against(0)}; }

std::vector<Gpu> gpus() { return {}; }

std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options) {
  throw Unsupported("GPU " + std::to_string(options.ordinal) +
                    " cannot be used: " + reason_against(options.ordinal));
}

}  // namespace switchyard::cuda

namespace switchyard {

struct CapturedGraph::Data {};

CapturedGraph::CapturedGraph(const Device& /*device*/, const std::function<void()>& /*step*/) {
  throw Unsupported("a graph can only be captured on a GPU, but " + cuda::reason_against(0));
}
CapturedGraph::~CapturedGraph() = default;
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;
void CapturedGraph::replay() const { throw InternalError("there is no graph"); }

}  // namespace switchyard
