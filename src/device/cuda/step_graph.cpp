#include "switchyard/step_graph.h"

#include <cuda_runtime_api.h>

#include "core/require.h"
#include "device/cuda/context.h"
#include "device/device_backend.h"

namespace switchyard {

struct StepGraph::Data {
  explicit Data(Device the_device) : device(std::move(the_device)) {}
  ~Data() {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(device.stream().handle); }

  Device device;  // whose memory the graph uses
  cudaGraphExec_t graph = nullptr;
};

StepGraph::StepGraph(const Device& device, const std::function<void()>& step)
    : data_(std::make_unique<Data>(device)) {
  require<Unsupported>(device.memory() == Memory::gpu,
                       "a graph is captured on a GPU, and this device is none");
  // Other threads, whose business this is not, may go on allocating.
  cuda::check(cudaStreamBeginCapture(data_->stream(), cudaStreamCaptureModeThreadLocal),
              "beginning to capture a step");
  cudaGraph_t captured = nullptr;
  try {
    step();
  } catch (...) {
    cudaStreamEndCapture(data_->stream(), &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    cudaGetLastError();
    throw;
  }
  cuda::check(cudaStreamEndCapture(data_->stream(), &captured), "capturing a step");
  const auto status = cudaGraphInstantiate(&data_->graph, captured, 0);
  cudaGraphDestroy(captured);
  cuda::check(status, "making a graph of a step");
}

StepGraph::~StepGraph() = default;
StepGraph::StepGraph(StepGraph&&) noexcept = default;
StepGraph& StepGraph::operator=(StepGraph&&) noexcept = default;

void StepGraph::replay() const {
  cuda::check(cudaGraphLaunch(data_->graph, data_->stream()), "replaying a step");
}

}  // namespace switchyard
