// One expert on one panel of rows, forward and backward, and the gradients of its matrices.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "device/cpu/scratch.h"
#include "device/device_backend.h"
#include "switchyard/experts.h"

namespace switchyard::cpu {

// Rows somewhere in memory, `stride` elements apart.
struct PanelRows {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  Dtype dtype = Dtype::f32;

  std::byte* row(std::int64_t i) const { return data + i * stride * size_of(dtype); }
};
PanelRows rows_from(const TensorView& rows, std::int64_t first);
PanelRows rows_from(const ConstTensorView& rows, std::int64_t first);  // to be read only

// Adds up where a task's time goes.
class TaskClock {
 public:
  explicit TaskClock(WorkTimes* times) : times_(times), last_(now()) {}
  void count_gemm() { add(times_ != nullptr ? &times_->gemm_ns : nullptr); }
  void count_other() { add(times_ != nullptr ? &times_->other_ns : nullptr); }

 private:
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
  void add(std::atomic<std::int64_t>* to);

  WorkTimes* times_;
  std::chrono::steady_clock::time_point last_;
};

struct ForwardPanel {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  std::int64_t rows = 0;
  PanelRows x;
  const float* row_weights = nullptr;  // or none
  PanelRows hidden;                    // no data: in scratch
  PanelRows out;
};
void forward_panel(const ForwardPanel& panel, Scratch& scratch, TaskClock& clock);

struct BackwardPanel {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  std::int64_t rows = 0;
  PanelRows x;                         // becomes w·x in the input stage
  const float* row_weights = nullptr;  // or none
  PanelRows hidden;                    // becomes its gradient
  HiddenRows hidden_rows = HiddenRows::kept;
  PanelRows d_out;
  PanelRows activated;             // out: w·activation, the input of the down projection
  PanelRows d_x;                   // out
  float* d_row_weights = nullptr;  // out, or none
};
void backward_panel(const BackwardPanel& panel, Scratch& scratch, TaskClock& clock);

// The gradients of one expert's matrices, in tasks of one block each.
struct MatrixGradients {
  const ExpertsOptions& options;
  const ExpertGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
  std::int64_t rows = 0;
  PanelRows x;  // w·x in the input stage
  PanelRows d_hidden;
  PanelRows d_out;
  PanelRows activated;
  const float* row_weights = nullptr;
};
std::int64_t num_gradient_tasks(const ExpertsOptions& options);
void gradient_task(const MatrixGradients& args, std::int64_t task, Scratch& scratch,
                   TaskClock& clock);

}  // namespace switchyard::cpu
