#include "switchyard/captured_graph.h"

#include <cuda_runtime_api.h>

#include "core/require.h"
#include "device/cuda/backend.h"
#include "device/cuda/runtime/device_memory.h"

namespace switchyard {

struct CapturedGraph::Data {
  explicit Data(Device the_device)
      : device(std::move(the_device)), context(cuda::context_of(device)) {}
  ~Data() {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
    if (capture != 0) context.release_capture(capture);
  }
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  Device device;  // whose memory the graph uses
  cuda::Context& context;
  std::uint64_t capture = 0;
  cudaGraphExec_t graph = nullptr;
};

CapturedGraph::CapturedGraph(const Device& device, const std::function<void()>& step) {
  require<Unsupported>(device.memory() == Memory::gpu,
                       "a graph is captured on a GPU, and this device is none");
  data_ = std::make_unique<Data>(device);
  cudaStream_t const stream = data_->context.stream();
  // Other threads, whose business this is not, may go on allocating.
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              "beginning to capture a step");
  cudaGraph_t captured = nullptr;
  try {
    data_->capture = cuda::capture_of(stream);
    step();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    cudaGetLastError();
    throw;
  }
  cuda::check(cudaStreamEndCapture(stream, &captured), "capturing a step");
  const auto status = cudaGraphInstantiate(&data_->graph, captured, 0);
  cudaGraphDestroy(captured);
  cuda::check(status, "making a graph of a step");
}

CapturedGraph::~CapturedGraph() = default;
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;

void CapturedGraph::replay() const {
  const auto& context = cuda::context_of(data_->device);  // for this thread, too
  cuda::check(cudaGraphLaunch(data_->graph, context.stream()), "replaying a step");
}

}  // namespace switchyard
