// SPDX-License-Identifier: Apache-2.0
#include "switchyard/captured_graph.h"

#include <cuda_runtime_api.h>

#include <vector>

#include "core/held.h"
#include "core/require.h"
#include "device/cuda/backend.h"

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

  Device device;  // owns the memory that the graph uses
  cuda::Context& context;
  std::uint64_t capture = 0;
  cudaGraphExec_t graph = nullptr;
  std::vector<std::weak_ptr<const PeerCheck>> meetings;  // one per meeting with other ranks
};

CapturedGraph::CapturedGraph(const Device& device, const std::function<void()>& step) {
  require<Unsupported>(device.memory() == Memory::gpu,
                       "a graph can only be captured on a GPU, but this device is a CPU");
  require(step != nullptr, "step is empty: pass a function");
  data_ = std::make_unique<Data>(device);
  auto& context = data_->context;
  const cuda::OnGpu gpu(context.ordinal());
  int status = cudaSuccess;
  data_->capture = context.begin_capture();
  try {
    step();
  } catch (...) {
    cudaGraphDestroy(context.end_capture(status));
    cudaGetLastError();
    context.take_meetings();
    throw;
  }
  data_->meetings = context.take_meetings();
  cudaGraph_t const captured = context.end_capture(status);
  cuda::check(status, "capturing a step");
  status = cudaGraphInstantiate(&data_->graph, captured, 0);
  cudaGraphDestroy(captured);
  cuda::check(status, "making a graph of a step");
}

CapturedGraph::~CapturedGraph() = default;
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;

void CapturedGraph::replay() const {
  for (const auto& meeting : held(data_, "graph").meetings) {
    const auto ranks = meeting.lock();
    require(ranks != nullptr, "the layers whose step this graph replays no longer exist");
    ranks->check();
  }
  const cuda::OnGpu gpu(data_->context.ordinal());
  data_->context.pace(static_cast<std::int64_t>(data_->meetings.size()));
  cuda::check(cudaGraphLaunch(data_->graph, data_->context.stream()), "replaying a step");
}

}  // namespace switchyard
