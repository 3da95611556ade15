// SPDX-License-Identifier: Apache-2.0
// The time that each stage of a step takes on one rank.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

struct StageTime {
  std::string name;
  double seconds = 0.0;
};

// Keeps stages in the order in which they were first seen.
class StageTimes {
 public:
  void add(std::string_view name, double seconds) {
    for (auto& stage : stages_) {
      if (stage.name == name) {
        stage.seconds += seconds;
        return;
      }
    }
    stages_.push_back({std::string(name), seconds});
  }
  // Calls fn, adds the time it takes and returns its result.
  template <typename Fn>
  decltype(auto) timed(std::string_view name, const Fn& fn) {
    struct Clock {
      StageTimes& times;
      std::string_view name;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~Clock() {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        times.add(name, took.count());
      }
    } clock{*this, name};
    return fn();
  }
  const std::vector<StageTime>& stages() const { return stages_; }
  // Returns 0 if there was no such stage.
  double seconds_of(std::string_view name) const {
    for (const auto& stage : stages_) {
      if (stage.name == name) return stage.seconds;
    }
    return 0.0;
  }

 private:
  std::vector<StageTime> stages_;
};

}  // namespace switchyard::train
