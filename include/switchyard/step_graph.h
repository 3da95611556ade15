// A step on a GPU that is captured once and replayed.
#pragma once

#include <functional>
#include <memory>

#include "switchyard/device.h"
#include "switchyard/export.h"

namespace switchyard {

// Captures everything that a step puts on a device's stream into one CUDA graph: of layers with
// bounded sizing and one rank, forward and backward. Tensors that the step was given stay what it
// reads and writes: new inputs are copied into them before a replay. What layers report (status(),
// check(), statistics()) is that of the last replay.
class SWITCHYARD_API StepGraph {
 public:
  // Calls step() once, which then only fills the graph; it must have been run as it is before, so
  // that no memory is missing. Throws DeviceError, with the reason, if the step cannot be captured.
  StepGraph(const Device& device, const std::function<void()>& step);
  ~StepGraph();
  StepGraph(StepGraph&&) noexcept;
  StepGraph& operator=(StepGraph&&) noexcept;

  // Puts the whole step on the device's stream.
  void replay() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace switchyard
