// SPDX-License-Identifier: Apache-2.0
// The expert that every token visits, in panels whose bits do not depend on the number of tokens.
#include <algorithm>
#include <cstring>

#include "device/cpu/experts/expert_panel.h"
#include "device/cpu/experts/matrix_gradients.h"
#include "device/cpu/experts/panels.h"
#include "device/cpu/kernels.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

struct TokenPanel {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  std::int64_t padded = 0;
};

TokenPanel token_panel(std::int64_t panel, std::int64_t num_tokens) {
  const auto first = panel * kTokenPanelRows;
  const auto tokens = std::min(kTokenPanelRows, num_tokens - first);
  return {first, tokens, padded_tokens(tokens)};
}

// Returns the panel's rows in place, or a copy in scratch that is padded with zero rows.
PanelRows padded_rows(const ConstTensorView& rows, const TokenPanel& panel, Scratch& scratch) {
  if (panel.tokens == panel.padded) return rows_from(rows, panel.first);
  const auto width = rows.shape()[1];
  const auto row_bytes = static_cast<std::size_t>(width * size_of(rows.dtype()));
  const PanelRows copy{scratch.take_bytes(panel.padded * width * size_of(rows.dtype())), width,
                       rows.dtype()};
  for (std::int64_t r = 0; r < panel.tokens; ++r) {
    std::memcpy(copy.row(r), rows.row(panel.first + r), row_bytes);
  }
  std::memset(copy.row(panel.tokens), 0,
              static_cast<std::size_t>(panel.padded - panel.tokens) * row_bytes);
  return copy;
}

// Returns rows to write to: in place, or in scratch until copy_back().
PanelRows padded_output(const TensorView& rows, const TokenPanel& panel, Scratch& scratch) {
  if (panel.tokens == panel.padded) return rows_from(rows, panel.first);
  const auto width = rows.shape()[1];
  return {scratch.take_bytes(panel.padded * width * size_of(rows.dtype())), width, rows.dtype()};
}

void copy_back(const PanelRows& from, const TensorView& rows, const TokenPanel& panel) {
  if (from.data == rows.row(panel.first)) return;
  for (std::int64_t r = 0; r < panel.tokens; ++r) {
    std::memcpy(rows.row(panel.first + r), from.row(r), static_cast<std::size_t>(rows.row_bytes()));
  }
}

PanelRows take_floats(const TokenPanel& panel, std::int64_t width, Scratch& scratch) {
  return {reinterpret_cast<std::byte*>(scratch.take_floats(panel.padded * width)), width,
          Dtype::f32};
}

void add_rows(const PanelRows& from, const TensorView& to, const TokenPanel& panel) {
  for (std::int64_t r = 0; r < panel.tokens; ++r) {
    element_kernels(to.dtype())
        .add(to.row(panel.first + r), reinterpret_cast<const float*>(from.row(r)), to.shape()[1]);
  }
}

}  // namespace

void shared_forward(const SharedForward& args, Workers& workers) {
  const auto num_tokens = args.x.rows();
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t i, Scratch& scratch) {
    const TokenPanel panel = token_panel(i, num_tokens);
    const PanelRows inner = args.inner ? padded_output(*args.inner, panel, scratch) : PanelRows{};
    const PanelRows sums = take_floats(panel, args.options.hidden, scratch);
    TaskClock clock(nullptr);
    forward_panel({.options = args.options,
                   .weights = args.weights,
                   .rows = panel.padded,
                   .x = padded_rows(args.x, panel, scratch),
                   .inner = inner,
                   .out = sums},
                  scratch, clock);
    if (args.inner) copy_back(inner, *args.inner, panel);
    add_rows(sums, args.y, panel);
  });
}

void shared_backward(const SharedBackward& args, Workers& workers, MemoryCache& memory) {
  const auto num_tokens = args.x.rows();
  const TensorView activated =
      memory.take({num_tokens, args.options.intermediate}, args.options.dtype);
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t i, Scratch& scratch) {
    const TokenPanel panel = token_panel(i, num_tokens);
    const PanelRows inner = padded_rows(args.inner, panel, scratch);
    const PanelRows panel_activated = padded_output(activated, panel, scratch);
    const PanelRows sums = take_floats(panel, args.options.hidden, scratch);
    TaskClock clock(nullptr);
    backward_panel({.options = args.options,
                    .weights = args.weights,
                    .rows = panel.padded,
                    .x = padded_rows(args.x, panel, scratch),
                    .inner = inner,
                    .inner_rows = args.inner_rows,
                    .d_out = padded_rows(args.d_y, panel, scratch),
                    .activated = panel_activated,
                    .d_x = sums},
                   scratch, clock);
    copy_back(inner, args.inner, panel);
    copy_back(panel_activated, activated, panel);
    add_rows(sums, args.d_x, panel);
  });
  workers.run(num_gradient_tasks(args.options), [&](std::int64_t task, Scratch& scratch) {
    TaskClock clock(nullptr);
    gradient_task({.options = args.options,
                   .gradients = args.gradients,
                   .mode = args.mode,
                   .rows = num_tokens,
                   .x = rows_from(args.x, 0),
                   .d_inner = rows_from(args.inner, 0),
                   .d_out = rows_from(args.d_y, 0),
                   .activated = rows_from(activated, 0)},
                  task, scratch, clock);
  });
}

}  // namespace switchyard::cpu
