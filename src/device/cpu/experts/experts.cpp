// SPDX-License-Identifier: Apache-2.0
// Runs experts over their groups of rows: cuts the work into panels and gradient blocks, and makes
// the blocks wait for their panels.
#include <memory>
#include <thread>
#include <vector>

#include "device/cpu/experts/expert_panel.h"
#include "device/cpu/experts/matrix_gradients.h"
#include "device/cpu/experts/panels.h"
#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

struct PanelTask {
  std::size_t expert = 0;
  std::int64_t first = 0;  // the first row
  std::int64_t rows = 0;
};

using Indices = std::span<const std::int32_t>;

std::vector<PanelTask> panel_tasks(Indices row_offsets, Indices group_rows) {
  std::vector<PanelTask> tasks;
  for (std::size_t e = 0; e < group_rows.size(); ++e) {
    const std::int64_t rows = group_rows[e];
    const auto step = panel_rows(rows);
    for (std::int64_t r = 0; r < rows; r += step) {
      tasks.push_back({e, row_offsets[e] + r, std::min(step, rows - r)});
    }
  }
  return tasks;
}

const float* weights_from(const std::optional<ConstTensorView>& weights, std::int64_t first) {
  return weights ? reinterpret_cast<const float*>(weights->data()) + first : nullptr;
}

// Counts the unfinished panels of each expert, so that its gradients start after the last one.
// Tasks start in order, panels first, so a task that waits only ever waits for running tasks.
class Pending {
 public:
  explicit Pending(std::size_t num_experts) : left_(num_experts) {}

  void expect(std::size_t expert) { left_[expert].fetch_add(1, std::memory_order_relaxed); }
  void wait_for(std::size_t expert) const {
    while (left_[expert].load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

  // Marks one of an expert's panels as finished on destruction, also after an exception.
  class Done {
   public:
    Done(Pending& pending, std::size_t expert) : left_(pending.left_[expert]) {}
    ~Done() { left_.fetch_sub(1, std::memory_order_release); }
    Done(const Done&) = delete;
    Done& operator=(const Done&) = delete;

   private:
    std::atomic<int>& left_;
  };

 private:
  std::vector<std::atomic<int>> left_;
};

}  // namespace

void experts_forward(const ExpertsForward& args, Workers& workers) {
  const auto tasks =
      panel_tasks(args.row_offsets.span<std::int32_t>(), args.group_rows.span<std::int32_t>());
  workers.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i, Scratch& scratch) {
    const PanelTask& task = tasks[static_cast<std::size_t>(i)];
    TaskClock clock(args.times);
    forward_panel({.options = args.options,
                   .weights = args.weights[task.expert],
                   .rows = task.rows,
                   .x = rows_from(args.in.rows, task.first),
                   .row_weights = weights_from(args.in.row_weights, task.first),
                   .inner = args.out.inner ? rows_from(*args.out.inner, task.first) : PanelRows{},
                   .out = rows_from(args.out.out, task.first)},
                  scratch, clock);
  });
}

void experts_backward(const ExpertsBackward& args, Workers& workers, MemoryCache& memory) {
  const auto row_offsets = args.row_offsets.span<std::int32_t>();
  const auto group_rows = args.group_rows.span<std::int32_t>();
  const auto panels = panel_tasks(row_offsets, group_rows);
  const auto num_panels = static_cast<std::int64_t>(panels.size());
  const auto per_expert = args.out.gradients.empty() ? 0 : num_gradient_tasks(args.options);
  const auto num_experts = static_cast<std::int64_t>(group_rows.size());
  const TensorView activated =
      memory.take({args.in.rows.rows(), args.options.intermediate}, args.options.dtype);
  float* d_row_weights =
      args.out.d_row_weights ? reinterpret_cast<float*>(args.out.d_row_weights->data()) : nullptr;
  Pending pending(group_rows.size());
  for (const PanelTask& task : panels) pending.expect(task.expert);

  const auto run_panel = [&](const PanelTask& task, Scratch& scratch) {
    const Pending::Done done(pending, task.expert);
    TaskClock clock(args.times);
    backward_panel(
        {.options = args.options,
         .weights = args.weights[task.expert],
         .rows = task.rows,
         .x = rows_from(args.in.rows, task.first),
         .row_weights = weights_from(args.in.row_weights, task.first),
         .inner = rows_from(args.in.inner, task.first),
         .inner_rows = args.in.inner_rows,
         .d_out = rows_from(args.in.d_out, task.first),
         .activated = rows_from(activated, task.first),
         .d_x = rows_from(args.out.d_rows, task.first),
         .d_row_weights = d_row_weights != nullptr ? d_row_weights + task.first : nullptr},
        scratch, clock);
  };
  const auto run_gradient = [&](std::int64_t task, Scratch& scratch) {
    const auto e = static_cast<std::size_t>(task / per_expert);
    pending.wait_for(e);
    TaskClock clock(args.times);
    const std::int64_t first = row_offsets[e];
    gradient_task({.options = args.options,
                   .gradients = args.out.gradients[e],
                   .mode = args.out.mode,
                   .rows = group_rows[e],
                   .x = rows_from(args.in.rows, first),
                   .d_inner = rows_from(args.in.inner, first),
                   .d_out = rows_from(args.in.d_out, first),
                   .activated = rows_from(activated, first),
                   .row_weights = weights_from(args.in.row_weights, first)},
                  task % per_expert, scratch, clock);
  };
  workers.run(num_panels + num_experts * per_expert, [&](std::int64_t i, Scratch& scratch) {
    if (i < num_panels) {
      run_panel(panels[static_cast<std::size_t>(i)], scratch);
    } else {
      run_gradient(i - num_panels, scratch);
    }
  });
}

}  // namespace switchyard::cpu
