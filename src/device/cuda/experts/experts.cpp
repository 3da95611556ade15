// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a rank's experts on a GPU.
#include <algorithm>
#include <initializer_list>
#include <optional>

#include "device/cuda/experts/expert_pass.h"
#include "device/cuda/kernels.h"

namespace switchyard::cuda {
namespace {

const float* floats_of(const std::optional<ConstTensorView>& view) {
  return view ? reinterpret_cast<const float*>(view->data()) : nullptr;
}
float* floats_of(const std::optional<TensorView>& view) {
  return view ? reinterpret_cast<float*>(view->data()) : nullptr;
}

// Groups must fit into every view, and views may differ in rows, so the smallest sets the capacity.
Groups groups_of(const ConstTensorView& row_offsets, const ConstTensorView& group_rows,
                 std::initializer_list<std::int64_t> num_rows) {
  return {reinterpret_cast<const std::int32_t*>(row_offsets.data()),
          reinterpret_cast<const std::int32_t*>(group_rows.data()),
          static_cast<int>(group_rows.rows()), std::min(num_rows)};
}

// Returns `rows` [R, H] as they are, or as the tokens that rows are read from.
SourceRows sources_of(const ConstTensorView& rows, const std::optional<TokenRows>& tokens) {
  SourceRows result = rows_of(rows);
  if (!tokens) return result;
  result.sources = reinterpret_cast<const std::int32_t*>(tokens->row_sources.data());
  result.top_k = static_cast<int>(tokens->top_k);
  result.num_tokens = tokens->x.rows();
  return result;
}

bool uses_hopper(const ExpertsOptions& options, const Context& context) {
  return context.uses_hopper_kernels() && options.dtype == Dtype::bf16;
}

// With tickets, blocks share out their tiles evenly. Setting tickets to zero takes some
// microseconds, more than they save where rows are few.
TensorView take_tickets(const ExpertsOptions& options, Groups& groups, Context& context) {
  constexpr std::int64_t kWorthwhileRows = 16384;
  if (!uses_hopper(options, context) || groups.row_capacity < kWorthwhileRows) return {};
  TensorView tickets = context.take({2}, Dtype::i32);
  context.set_zero(tickets);
  groups.tickets = reinterpret_cast<std::int32_t*>(tickets.data());
  return tickets;
}

// Weight gradients take less time in this order.
TensorView take_order(const ExpertsBackward& args, Groups& groups, Context& context) {
  const bool are_frozen = args.out.gradients.empty();
  if (are_frozen || !uses_hopper(args.options, context) || groups.count < 2) return {};
  TensorView order = context.take({groups.count}, Dtype::i32);
  auto* const to = reinterpret_cast<std::int32_t*>(order.data());
  hopper::order_groups(groups, to, context);
  groups.order = to;
  return order;
}

SourceRows input_of(const ConstTensorView& rows, const std::optional<TokenRows>& tokens) {
  return sources_of(tokens ? tokens->x : rows, tokens);
}
std::int64_t num_rows_of(const ConstTensorView& rows, const std::optional<TokenRows>& tokens) {
  return tokens ? tokens->row_sources.rows() : rows.rows();
}

}  // namespace

void experts_forward(const ExpertsForward& args, Context& context) {
  const auto num_rows = num_rows_of(args.in.rows, args.in.tokens);
  const auto& inner = args.out.inner;
  const SourceRows x = input_of(args.in.rows, args.in.tokens);
  Groups groups = groups_of(args.row_offsets, args.group_rows,
                            {num_rows, args.out.out.rows(), inner ? inner->rows() : num_rows});
  const TensorView tickets = take_tickets(args.options, groups, context);
  expert_forward({.options = args.options,
                  .weights = args.weights,
                  .groups = groups,
                  .x = x,
                  .row_weights = {floats_of(args.in.row_weights), x.sources},
                  .inner = inner ? rows_of(*inner) : Rows{}},
                 rows_of(args.out.out), context);
}

void experts_backward(const ExpertsBackward& args, Context& context) {
  const auto& in = args.in;
  const auto& out = args.out;
  const auto num_rows = num_rows_of(in.rows, in.tokens);
  const SourceRows x = input_of(in.rows, in.tokens);
  Groups groups = groups_of(
      args.row_offsets, args.group_rows,
      {num_rows, in.inner.rows(), out.d_rows.rows(), in.tokens ? num_rows : in.d_out.rows()});
  const TensorView tickets = take_tickets(args.options, groups, context);
  const TensorView order = take_order(args, groups, context);
  expert_backward({.options = args.options,
                   .weights = args.weights,
                   .groups = groups,
                   .x = x,
                   .row_weights = {floats_of(in.row_weights), x.sources},
                   .inner = rows_of(in.inner)},
                  {.inner_rows = in.inner_rows,
                   .d_out = sources_of(in.d_out, in.tokens),
                   .d_x = rows_of(out.d_rows),
                   .d_row_weights = {floats_of(out.d_row_weights), x.sources},
                   .weights = out.gradients,
                   .mode = out.mode},
                  context);
}

}  // namespace switchyard::cuda
