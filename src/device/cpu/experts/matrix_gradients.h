// SPDX-License-Identifier: Apache-2.0
// The gradients of an expert's matrices, over all rows of its group.
#pragma once

#include <cstdint>

#include "device/cpu/experts/panel_rows.h"
#include "device/cpu/scratch.h"
#include "device/cpu/task_clock.h"
#include "switchyard/experts.h"

namespace switchyard::cpu {

// The arguments of gradient tasks. Each task computes one block of one matrix.
struct MatrixGradients {
  const ExpertsOptions& options;
  const ExpertGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
  std::int64_t rows = 0;
  PanelRows x;  // w·x for WeightStage::input
  PanelRows d_inner;
  PanelRows d_out;
  PanelRows activated;
  const float* row_weights = nullptr;
};
std::int64_t num_gradient_tasks(const ExpertsOptions& options);
void gradient_task(const MatrixGradients& args, std::int64_t task, Scratch& scratch,
                   TaskClock& clock);

}  // namespace switchyard::cpu
