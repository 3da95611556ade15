// SPDX-License-Identifier: Apache-2.0
// A step on a GPU that is captured once and then replayed.
#pragma once

#include <functional>
#include <memory>

#include "switchyard/device.h"
#include "switchyard/export.h"

namespace switchyard {

// A CUDA graph of everything that a step puts on a device's stream. The step may run layers with
// bounded sizing, forward and backward. With several ranks, every rank captures its own graph and
// all of them replay together: on the GPU, each graph waits for the others. A replay reads and
// writes the layers and tensors that the captured step used, so they must outlive the graph; copy
// new inputs into those tensors before a replay. Plain numbers, such as
// LayerBackwardInput::d_losses, keep their captured values.
//
// Statistics count every replay. A layer's plan_status(), check() and stats() describe the forward
// that it ran or captured last: if that was captured, the last replay of that graph, and nothing
// before the first replay. run_step also notices problems in a graph whose layer has since run
// elsewhere.
class SWITCHYARD_API CapturedGraph {
 public:
  // Captures step() by calling it once; the call fills the graph and computes nothing. The same
  // step must have run before, because nothing can be allocated during a capture; a device with a
  // DeviceAllocator does not need that. Throws Unsupported if the device is not a GPU, and
  // DeviceError, with the reason, if the step cannot be captured.
  //
  // Reserves for the graph all device memory that is in use during the capture, by the step or by
  // anything else. That memory returns to the device once the graph is destroyed and its users have
  // released it. A device that uses its own stream captures on a separate one, which does not
  // synchronise with the legacy stream; a step that launches work itself must therefore ask
  // Device::stream().
  CapturedGraph(const Device& device, const std::function<void()>& step);
  ~CapturedGraph();
  CapturedGraph(CapturedGraph&&) noexcept;
  CapturedGraph& operator=(CapturedGraph&&) noexcept;

  // Enqueues the whole step on the device's stream. Throws CommunicationError if a rank that takes
  // part in the step has failed, and InvalidArgument if the layers of a step over several ranks are
  // gone.
  void replay() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace switchyard
