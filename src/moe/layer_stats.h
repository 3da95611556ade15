// Fills LayerStats.
#pragma once

#include <chrono>
#include <string_view>
#include <vector>

#include "switchyard/moe_layer.h"

namespace switchyard {

// Cuts a call into stages: each call of end() names the time since the one before.
class StageClock {
 public:
  explicit StageClock(std::vector<LayerStats::Stage>& stages) : stages_(stages) { stages_.clear(); }

  void end(std::string_view name) { add(name, since_last()); }
  // The experts' stage, split by what their threads spent.
  void end_experts(const Experts::Seconds& before, const Experts::Seconds& after);

 private:
  double since_last();
  void add(std::string_view name, double seconds) { stages_.push_back({name, seconds}); }

  std::vector<LayerStats::Stage>& stages_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// What the plan says about rows, drops and overflow.
void describe_plan(const Plan& plan, LayerStats& stats);

}  // namespace switchyard
