// Stands in for CUDA where the build found no toolkit.
#include "device/cuda/runtime/probe.h"
#include "switchyard/error.h"
#include "switchyard/step_graph.h"

namespace switchyard::cuda {

std::string toolkit_version() { return ""; }

std::string reason_against(int /*ordinal*/) { return "this build has no CUDA"; }

Feature device_feature() { return {"cuda", false, reason_against(0)}; }

std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options) {
  throw Unsupported("GPU " + std::to_string(options.ordinal) +
                    " cannot be used: " + reason_against(options.ordinal));
}

}  // namespace switchyard::cuda

namespace switchyard {

struct StepGraph::Data {};

StepGraph::StepGraph(const Device& /*device*/, const std::function<void()>& /*step*/) {
  throw Unsupported("a graph is captured on a GPU, and " + cuda::reason_against(0));
}
StepGraph::~StepGraph() = default;
StepGraph::StepGraph(StepGraph&&) noexcept = default;
StepGraph& StepGraph::operator=(StepGraph&&) noexcept = default;
void StepGraph::replay() const {}

}  // namespace switchyard
