// SPDX-License-Identifier: Apache-2.0
// Times the stages of a layer with events on its stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "device/device_backend.h"

struct CUevent_st;
struct CUstream_st;

namespace switchyard::cuda {

class EventTimer final : public StageTimer {
 public:
  // Starts timing on `stream` of that GPU. Waits are counted in `host_syncs`, which the timer keeps
  // alive.
  EventTimer(int ordinal, CUstream_st* stream,
             std::shared_ptr<std::atomic<std::int64_t>> host_syncs);

  void end(std::string_view stage) override;
  void stop() override { is_stopped_ = true; }
  std::vector<Stage> read() const override;

 private:
  using Event = std::shared_ptr<CUevent_st>;
  Event record() const;

  int ordinal_;
  CUstream_st* stream_;
  std::shared_ptr<std::atomic<std::int64_t>> host_syncs_;
  Event begin_;
  bool is_stopped_ = false;
  std::vector<std::pair<std::string_view, Event>> ends_;
};

}  // namespace switchyard::cuda
