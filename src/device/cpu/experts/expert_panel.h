// SPDX-License-Identifier: Apache-2.0
// One expert on one panel of rows, forward and backward.
#pragma once

#include <cstdint>

#include "device/cpu/experts/panel_rows.h"
#include "device/cpu/scratch.h"
#include "device/cpu/task_clock.h"
#include "device/device_backend.h"
#include "switchyard/experts.h"

namespace switchyard::cpu {

struct ForwardPanel {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  std::int64_t rows = 0;
  PanelRows x;
  const float* row_weights = nullptr;  // may be null
  PanelRows inner;                     // in scratch if its data is null
  PanelRows out;
};
void forward_panel(const ForwardPanel& panel, Scratch& scratch, TaskClock& clock);

struct BackwardPanel {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  std::int64_t rows = 0;
  PanelRows x;                         // becomes w·x for WeightStage::input
  const float* row_weights = nullptr;  // may be null
  PanelRows inner;                     // becomes its gradient
  InnerRows inner_rows = InnerRows::kept;
  PanelRows d_out;
  PanelRows activated;             // out: w·activation, the input of the down projection
  PanelRows d_x;                   // out
  float* d_row_weights = nullptr;  // out; may be null
};
void backward_panel(const BackwardPanel& panel, Scratch& scratch, TaskClock& clock);

}  // namespace switchyard::cpu
