// SPDX-License-Identifier: Apache-2.0
// The shared expert, which every token visits, on a GPU.
#include <array>
#include <span>

#include "device/cuda/experts/expert_pass.h"
#include "device/cuda/experts/row_passes.h"
#include "device/cuda/kernels.h"

namespace switchyard::cuda {
namespace {

Groups one_group(std::int64_t num_rows, Context& context) {
  const std::array<std::int32_t, 2> words{0, static_cast<std::int32_t>(num_rows)};
  const auto* table =
      static_cast<const std::int32_t*>(context.constant(std::as_bytes(std::span(words))));
  return {table, table + 1, 1, num_rows};
}

}  // namespace

// The expert's output is rounded to the rows' dtype before it is added, one rounding more than on a
// CPU: the products have no f32 output for bf16 rows.
void shared_forward(const SharedForward& args, Context& context) {
  const auto& options = args.options;
  const auto num_rows = args.x.rows();
  const Groups groups = one_group(num_rows, context);
  const TensorView out = context.take({num_rows, options.hidden}, options.dtype);
  expert_forward({.options = options,
                  .weights = {&args.weights, 1},
                  .groups = groups,
                  .x = rows_of(args.x),
                  .inner = args.inner ? rows_of(*args.inner) : Rows{}},
                 rows_of(out), context);
  add_rows({.dtype = options.dtype,
            .groups = groups,
            .width = options.hidden,
            .from = rows_of(out),
            .to = rows_of(args.y)},
           context);
  context.mark("activation");
}

void shared_backward(const SharedBackward& args, Context& context) {
  const auto& options = args.options;
  const auto num_rows = args.x.rows();
  const Groups groups = one_group(num_rows, context);
  const TensorView d_x = context.take({num_rows, options.hidden}, options.dtype);
  expert_backward({.options = options,
                   .weights = {&args.weights, 1},
                   .groups = groups,
                   .x = rows_of(args.x),
                   .inner = rows_of(args.inner)},
                  {.inner_rows = args.inner_rows,
                   .d_out = rows_of(args.d_y),
                   .d_x = rows_of(d_x),
                   .weights = {&args.gradients, 1},
                   .mode = args.mode},
                  context);
  add_rows({.dtype = options.dtype,
            .groups = groups,
            .width = options.hidden,
            .from = rows_of(d_x),
            .to = rows_of(args.d_x)},
           context);
  context.mark("activation");
}

}  // namespace switchyard::cuda
