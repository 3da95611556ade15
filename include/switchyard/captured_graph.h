// A step on a GPU that is captured once and replayed.
#pragma once

#include <functional>
#include <memory>

#include "switchyard/device.h"
#include "switchyard/export.h"

namespace switchyard {

// Captures everything that a step puts on a device's stream into one CUDA graph: of layers with
// bounded sizing, forward and backward. At several ranks every rank captures its own, and all
// replay together: a graph waits on the GPU for the others'. Layers and tensors that the step used
// stay what it reads and writes, and must outlive the graph: new inputs are copied into them before
// a replay. Numbers, such as LayerBackwardInput::d_losses, stay as they were captured.
//
// Statistics count every replay. A layer's plan_status(), check() and stats() are those of the
// forward that it ran or captured last: of that graph's last replay, and of nothing before its
// first. What went wrong in a graph whose layer has run elsewhere since, run_step still sees.
class SWITCHYARD_API CapturedGraph {
 public:
  // Calls step() once, which then only fills the graph; it must have been run as it is before, so
  // that no memory is missing. Throws DeviceError, with the reason, if the step cannot be captured.
  // All memory of the device that is in use during the capture, by the step or by anything else, is
  // reserved for the graph, and returns to the device when the graph is gone and its users have
  // released it. A device that uses its own stream captures on a separate one that does not
  // synchronise with the legacy stream, so a step that launches work itself asks Device::stream().
  CapturedGraph(const Device& device, const std::function<void()>& step);
  ~CapturedGraph();
  CapturedGraph(CapturedGraph&&) noexcept;
  CapturedGraph& operator=(CapturedGraph&&) noexcept;

  // Puts the whole step on the device's stream. Throws CommunicationError if a rank that it met
  // before has failed.
  void replay() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace switchyard
