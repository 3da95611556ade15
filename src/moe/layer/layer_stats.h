// Fills LayerStats.
#pragma once

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "device/device_backend.h"
#include "switchyard/moe_layer.h"

namespace switchyard {

// Cuts a call into stages: each call of end() names the time since the one before. On a GPU that is
// the device's own time, which its timer knows later; or nobody's, where it has none.
class StageClock {
 public:
  StageClock(const DeviceBackend& device, std::vector<LayerStats::Stage>& stages,
             std::shared_ptr<StageTimer>& timer);
  ~StageClock() {
    if (timer_ != nullptr) timer_->stop();
  }
  StageClock(const StageClock&) = delete;
  StageClock& operator=(const StageClock&) = delete;

  void end(std::string_view name);
  // The experts' stage, split by what their threads spent.
  void end_experts(const Experts::Seconds& before, const Experts::Seconds& after);

 private:
  double since_last();
  void add(std::string_view name, double seconds) { stages_.push_back({name, seconds}); }

  std::vector<LayerStats::Stage>& stages_;
  const bool is_host_;
  StageTimer* timer_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// What a timer, or none, knows by now. Waits for the device.
std::vector<LayerStats::Stage> stages_of(const std::shared_ptr<StageTimer>& timer);

// What the plan says about rows, drops and overflow.
void describe_plan(const Plan& plan, LayerStats& stats);

}  // namespace switchyard
