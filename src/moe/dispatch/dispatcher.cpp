// SPDX-License-Identifier: Apache-2.0
// Checks arguments and expresses the four operations as scatters and gathers.
#include "switchyard/dispatcher.h"

#include <array>

#include "comm/agreement.h"
#include "core/held.h"
#include "core/require.h"
#include "moe/check_tensors.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_maker.h"
#include "moe/plan/plan_record.h"

namespace switchyard {
namespace {

void require_tokens(const Plan& plan, const ConstTensorView& view, std::string_view name) {
  const Shape expected{plan.num_tokens(), plan.options().hidden};
  require(view.dtype() == plan.options().dtype && view.shape() == expected,
          "{} is {} {}, but the plan has tokens {} {}", name, name_of(view.dtype()), view.shape(),
          name_of(plan.options().dtype), expected);
  require_memory(view, data_of(plan).device.memory(), name);
}

void require_rows(const Plan& plan, const ConstTensorView& view, std::string_view name) {
  const auto hidden = plan.options().hidden;
  require(view.dtype() == plan.options().dtype && view.shape().rank() == 2 &&
              view.shape()[1] == hidden && view.rows() >= plan.row_capacity() &&
              view.is_contiguous(),
          "{} is {} {} with row stride {}, but the plan needs contiguous {} [{},{}] or more rows",
          name, name_of(view.dtype()), view.shape(), view.row_stride(),
          name_of(plan.options().dtype), plan.row_capacity(), hidden);
  require_memory(view, data_of(plan).device.memory(), name);
}

void require_weights(const Plan& plan, const std::optional<ConstTensorView>& view,
                     std::string_view name) {
  if (!view) return;
  const Shape expected{plan.num_tokens(), plan.top_k()};
  require(view->dtype() == Dtype::f32 && view->shape() == expected && view->is_contiguous(),
          "{} is {} {}, but must be contiguous f32 {}", name, name_of(view->dtype()), view->shape(),
          expected);
  require_memory(*view, data_of(plan).device.memory(), name);
}

void require_row_weights(const Plan& plan, const std::optional<ConstTensorView>& view,
                         std::string_view name) {
  if (!view) return;
  require(view->dtype() == Dtype::f32 && view->shape().rank() == 1 &&
              view->rows() >= plan.row_capacity() && view->is_contiguous(),
          "{} is {} {}, but must be contiguous f32 [{}] or more", name, name_of(view->dtype()),
          view->shape(), plan.row_capacity());
  require_memory(*view, data_of(plan).device.memory(), name);
}

void require_peer(const Mover& mover) {
  require<Unsupported>(mover.kind() == MoverKind::peer,
                       "d_received_weights works only with the peer mover: use d_row_weights");
}

void require_received_weights(const Plan& plan, const std::optional<ConstTensorView>& view,
                              std::string_view name) {
  if (!view) return;
  const Shape expected{data_of(plan).token_capacity(), plan.top_k()};
  require(view->dtype() == Dtype::f32 && view->shape() == expected && view->is_contiguous(),
          "{} is {} {}, but must be contiguous f32 {}", name, name_of(view->dtype()), view->shape(),
          expected);
  require_memory(*view, data_of(plan).device.memory(), name);
}

void require_both(bool a, bool b, std::string_view name_a, std::string_view name_b) {
  require(a == b, "{} was given without {}: they go together", a ? name_a : name_b,
          a ? name_b : name_a);
}

void require_receives(const Mover& mover, const Plan& plan) {
  require<Unsupported>(
      mover.receives(plan),
      "this dispatcher does not receive tokens: use dispatch unless receives_tokens() is true");
}

void require_own_plan(const Plan& plan, const ExpertPlacement& placement) {
  require(&plan.placement() == &placement, "the plan was made by another dispatcher");
}

}  // namespace

MoverKind choose_mover(Communicator& comm, const DispatcherOptions& options, const Device& device) {
  const std::array<Field, 3> fields{
      {{"the mover", static_cast<std::int64_t>(options.mover)},
       {"combine", static_cast<std::int64_t>(options.combine)},
       {"the memory they work in, 0 for the host's", static_cast<std::int64_t>(device.memory())}}};
  require_equal_fields(comm, fields);
  const bool is_alone = comm.size() == 1;
  const bool is_host = device.memory() == Memory::host;
  const bool reaches = is_alone || comm.mapped_buffers() != nullptr;
  const bool pre_reduced = options.combine == CombineMode::pre_reduced;
  require<Unsupported>(options.mover != MoverKind::direct || reaches,
                       "the direct mover needs ranks that share memory, which the {} communicator "
                       "does not offer; use the packed mover",
                       comm.backend());
  require(options.mover != MoverKind::direct || !pre_reduced,
          "combine = pre_reduced works only with the packed mover, not with direct");
  require(options.mover != MoverKind::peer || !pre_reduced,
          "combine = pre_reduced works only with the packed mover, not with peer");
  require<Unsupported>(is_host || (options.mover != MoverKind::packed && !pre_reduced),
                       "the packed mover works only in host memory; on GPUs use the peer mover");
  require<Unsupported>(is_host || is_alone || options.mover != MoverKind::direct,
                       "the direct mover works only in host memory; on GPUs use the peer mover");
  if (options.mover == MoverKind::packed || pre_reduced) return MoverKind::packed;
  if (is_alone) return MoverKind::direct;
  if (options.mover == MoverKind::peer || !is_host) return MoverKind::peer;
  return reaches ? MoverKind::direct : MoverKind::packed;
}

std::unique_ptr<Mover> make_mover(MoverKind kind, Communicator& comm, CombineMode combine,
                                  const PlanMaker& planner, const Device& device) {
  if (kind == MoverKind::peer) return make_peer_mover(planner.meetings(), device);
  return kind == MoverKind::direct ? make_direct_mover(comm, device)
                                   : make_packed_mover(comm, combine, device);
}

ReceivedTokens Mover::receive(const Plan& /*plan*/, const ConstTensorView& /*tokens*/,
                              const ConstTensorView& /*weights*/) {
  throw InternalError("this mover scatters");
}
ConstTensorView Mover::receive(const Plan& /*plan*/, const ConstTensorView& /*tokens*/) {
  throw InternalError("this mover scatters");
}

Dispatcher::Dispatcher(Communicator& comm, ExpertPlacement placement,
                       const DispatcherOptions& options, const Device& device)
    : comm_(comm) {
  or_abort_alone({&comm}, "Dispatcher", [&] {
    const MoverKind kind = choose_mover(comm, options, device);
    planner_ = std::make_unique<PlanMaker>(comm, std::move(placement), options.plan, device,
                                           exchange_of(kind));
    mover_ = make_mover(kind, comm, options.combine, *planner_, device);
  });
}

Dispatcher::~Dispatcher() = default;
Dispatcher::Dispatcher(Dispatcher&&) noexcept = default;

PlanMaker& Dispatcher::planner() const { return held(planner_, "dispatcher"); }
Mover& Dispatcher::moves() const { return held(mover_, "dispatcher"); }

Plan Dispatcher::plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token) {
  return or_abort_alone({&comm_}, "plan", [&] {
    return moves().plan(planner(), expert_ids, planner().problems_of(first_non_finite_token));
  });
}
Plan Dispatcher::plan(const Routing& routing) {
  return or_abort_alone({&comm_}, "plan", [&] {
    return moves().plan(planner(), routing.expert_ids, planner().problems_of(routing));
  });
}

std::int64_t Dispatcher::plan_words(const ExpertPlacement& placement, int rank,
                                    std::int64_t num_tokens, std::int64_t top_k) {
  require(
      0 <= rank && rank < placement.num_ranks() && num_tokens >= 0 && top_k >= 0,
      "rank ({}) must be one of {} ranks, and num_tokens ({}) and top_k ({}) must not be negative",
      rank, placement.num_ranks(), num_tokens, top_k);
  return words_of_plan(words_without_picks(placement, rank), num_tokens, top_k);
}

void Dispatcher::plan_into(const ConstTensorView& expert_ids, const TensorView& memory) {
  or_abort_alone({&comm_}, "plan",
                 [&] { planner().plan_into(expert_ids, planner().problems_of(-1), memory); });
}

PlanForm Dispatcher::complete(const TensorView& memory, const PlanForm& form) const {
  return or_abort_alone({&comm_}, "plan", [&] { return planner().complete(memory, form); });
}

Plan Dispatcher::plan_in(const TensorView& memory, const PlanForm& form) const {
  return or_abort({&comm_}, "plan", [&] { return plan_of(planner().plan_in(memory, form)); });
}

void Dispatcher::resize(const Sizing& sizing) { planner().resize(sizing); }

void Dispatcher::dispatch(const Plan& plan, const DispatchInput& in, const DispatchOutput& out) {
  check_arguments({&comm_}, "dispatch", [&] {
    require_own_plan(plan, planner().placement());
    require_tokens(plan, in.x, "x");
    require_rows(plan, out.rows, "rows");
    require_weights(plan, in.weights, "weights");
    require_row_weights(plan, out.row_weights, "row_weights");
    require_both(in.weights.has_value(), out.row_weights.has_value(), "weights", "row_weights");
    require_apart(in.x, out.rows, "x and rows");
  });
  or_abort_alone({&comm_}, "dispatch", [&] {
    moves().scatter(plan, {.tokens = in.x,
                           .rows = out.rows,
                           .token_scalars = in.weights,
                           .row_scalars = out.row_weights});
  });
}

Tensor Dispatcher::dispatch(const Plan& plan, const ConstTensorView& x) {
  Tensor rows = or_abort_alone({&comm_}, "dispatch", [&] {
    return data_of(plan).device.empty({plan.row_capacity(), plan.options().hidden},
                                      plan.options().dtype);
  });
  dispatch(plan, {.x = x}, {.rows = rows});
  return rows;
}

bool Dispatcher::receives_tokens(const Plan& plan) const { return moves().receives(plan); }

ReceivedTokens Dispatcher::receive(const Plan& plan, const ConstTensorView& x,
                                   const ConstTensorView& weights) {
  check_arguments({&comm_}, "receive", [&] {
    require_own_plan(plan, planner().placement());
    require_tokens(plan, x, "x");
    require_weights(plan, weights, "weights");
    require_receives(moves(), plan);
  });
  return or_abort_alone({&comm_}, "receive", [&] { return moves().receive(plan, x, weights); });
}

ConstTensorView Dispatcher::receive(const Plan& plan, const ConstTensorView& tokens) {
  check_arguments({&comm_}, "receive", [&] {
    require_own_plan(plan, planner().placement());
    require_tokens(plan, tokens, "tokens");
    require_receives(moves(), plan);
  });
  return or_abort_alone({&comm_}, "receive", [&] { return moves().receive(plan, tokens); });
}

TensorView Dispatcher::take_rows(const Plan& plan) const {
  return or_abort_alone({&comm_}, "take_rows", [&] {
    return moves().take({plan.row_capacity(), plan.options().hidden}, plan.options().dtype);
  });
}

TensorView Dispatcher::take_row_weights(const Plan& plan) const {
  return or_abort_alone({&comm_}, "take_row_weights",
                        [&] { return moves().take({plan.row_capacity()}, Dtype::f32); });
}

TensorView Dispatcher::take_received_weights(const Plan& plan) const {
  return or_abort_alone({&comm_}, "take_received_weights", [&] {
    require_peer(moves());
    return moves().take({data_of(plan).token_capacity(), plan.top_k()}, Dtype::f32);
  });
}

void Dispatcher::combine(const Plan& plan, const CombineInput& in, const TensorView& y) {
  check_arguments({&comm_}, "combine", [&] {
    require_own_plan(plan, planner().placement());
    require_rows(plan, in.rows, "rows");
    require_weights(plan, in.weights, "weights");
    require_tokens(plan, y, "y");
    require_apart(in.rows, y, "rows and y");
  });
  or_abort_alone({&comm_}, "combine", [&] {
    moves().gather(plan, {.rows = in.rows, .weights = in.weights, .tokens = y});
  });
}

Tensor Dispatcher::combine(const Plan& plan, const ConstTensorView& rows,
                           const ConstTensorView& weights) {
  Tensor y = or_abort_alone({&comm_}, "combine", [&] {
    return data_of(plan).device.empty({plan.num_tokens(), plan.options().hidden},
                                      plan.options().dtype);
  });
  combine(plan, {.rows = rows, .weights = weights}, y);
  return y;
}

void Dispatcher::combine_backward(const Plan& plan, const CombineBackwardInput& in,
                                  const CombineBackwardOutput& out) {
  check_arguments({&comm_}, "combine_backward", [&] {
    require_own_plan(plan, planner().placement());
    require_tokens(plan, in.d_y, "d_y");
    require_rows(plan, out.d_rows, "d_rows");
    require_weights(plan, in.weights, "weights");
    require_weights(plan, out.d_weights, "d_weights");
    if (in.rows) require_rows(plan, *in.rows, "rows");
    require_both(in.rows.has_value(), out.d_weights.has_value(), "rows", "d_weights");
    require_apart(in.d_y, out.d_rows, "d_y and d_rows");
  });
  or_abort_alone({&comm_}, "combine_backward", [&] {
    moves().scatter(plan, {.tokens = in.d_y,
                           .scale = in.weights,
                           .rows = out.d_rows,
                           .dot_rows = in.rows,
                           .dots = out.d_weights});
  });
}

void Dispatcher::dispatch_backward(const Plan& plan, const DispatchBackwardInput& in,
                                   const DispatchBackwardOutput& out) {
  check_arguments({&comm_}, "dispatch_backward", [&] {
    require_own_plan(plan, planner().placement());
    require_rows(plan, in.d_rows, "d_rows");
    require_tokens(plan, out.d_x, "d_x");
    require_row_weights(plan, in.d_row_weights, "d_row_weights");
    require_weights(plan, out.d_weights, "d_weights");
    require(!in.d_row_weights || !in.d_received_weights,
            "d_row_weights and d_received_weights were both given: give only one of them");
    if (in.d_received_weights) require_peer(moves());
    require_received_weights(plan, in.d_received_weights, "d_received_weights");
    require_both(in.d_row_weights || in.d_received_weights, out.d_weights.has_value(),
                 "d_row_weights", "d_weights");
    require_apart(in.d_rows, out.d_x, "d_rows and d_x");
  });
  or_abort_alone({&comm_}, "dispatch_backward", [&] {
    const bool by_source = in.d_received_weights.has_value();
    moves().gather(plan, {.rows = in.d_rows,
                          .tokens = out.d_x,
                          .row_scalars = by_source ? in.d_received_weights : in.d_row_weights,
                          .token_scalars = out.d_weights,
                          .scalars_by_source = by_source});
  });
}

void Dispatcher::spoil(std::span<const TensorView> views) const { moves().spoil(views); }

MoverKind Dispatcher::mover() const { return moves().kind(); }

std::int64_t Dispatcher::bytes_on_wire() const { return moves().bytes_on_wire(); }

}  // namespace switchyard
