// SPDX-License-Identifier: Apache-2.0
// Moves rows to the experts and back, forward and backward.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/placement.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

class Mover;

// Selects how rows travel between ranks.
enum class MoverKind {
  // Direct at one rank; peer between GPUs; on CPUs direct if the communicator maps memory and
  // combine is per_assignment, otherwise packed.
  automatic,
  // Writes rows to and reads them from their slots in the memory of other ranks. For CPUs, and for
  // a single rank on any device.
  direct,
  // Sends rows over all_to_all. A token goes to a rank once, however many experts it picked there.
  // For CPUs.
  packed,
  // Devices write to each other's memory without involving their hosts. A token goes to a rank
  // once. Ranks are threads of one process, or processes of one host.
  peer,
};

// Selects what travels back from the experts.
enum class CombineMode {
  // One row per assignment, added at home in k order. The bits are the same at every EP size.
  per_assignment,
  // One row per token and rank, added at the expert's rank. Sends fewer bytes, but the bits depend
  // on the EP size. Applies to combine and dispatch_backward; requires the packed mover.
  pre_reduced,
};

// Options of a Dispatcher.
struct DispatcherOptions {
  PlanOptions plan = {};
  MoverKind mover = MoverKind::automatic;
  CombineMode combine = CombineMode::per_assignment;
};

// The arguments of dispatch. This and the structs below use these shapes: this rank has T tokens
// with K picks each, H elements per row, and R = plan.row_capacity() rows. x, y and their gradients
// are [T, H]; rows and their gradients are [≥ R, H], contiguous; all have the plan's dtype. Weights
// are [T, K] and row weights [≥ R], contiguous f32. All tensors are in the memory of the
// dispatcher's device.
struct DispatchInput {
  ConstTensorView x;
  std::optional<ConstTensorView> weights = {};  // sent along with the rows, into row_weights
};
// The tensors that dispatch writes.
struct DispatchOutput {
  TensorView rows;  // padding rows become 0; rows beyond plan.num_rows() are left unchanged
  std::optional<TensorView> row_weights = {};  // padding rows get 0
};
// The tensors that combine reads.
struct CombineInput {
  ConstTensorView rows;
  std::optional<ConstTensorView> weights = {};  // none: 1
};
// The tensors that combine_backward reads.
struct CombineBackwardInput {
  ConstTensorView d_y;
  std::optional<ConstTensorView> weights = {};  // as given to combine
  std::optional<ConstTensorView> rows = {};     // as given to combine; required for d_weights
};
// The tensors that combine_backward writes.
struct CombineBackwardOutput {
  TensorView d_rows;  // padding rows become 0
  std::optional<TensorView> d_weights = {};
};
// The tensors that dispatch_backward reads.
struct DispatchBackwardInput {
  ConstTensorView d_rows;
  // Gradients of the row weights, [≥ R], or of the weights of received tokens, [D, K]. Give at most
  // one of the two, the same one on all ranks that own experts.
  std::optional<ConstTensorView> d_row_weights = {};
  std::optional<ConstTensorView> d_received_weights = {};
};
// The tensors that dispatch_backward writes.
struct DispatchBackwardOutput {
  TensorView d_x;
  std::optional<TensorView> d_weights = {};
};

// The tokens that a rank has received from all ranks, each once, and the token of every row.
// ExpertsInput::tokens takes these. D is their number or, for a bounded plan, the token capacity.
struct ReceivedTokens {
  ConstTensorView tokens;       // [D, H]
  ConstTensorView weights;      // [D, K] f32
  ConstTensorView row_sources;  // [R] i32: d·K + k
};

// The sizes needed to read a plan that is stored in a caller's tensor.
struct PlanForm {
  std::int64_t num_tokens = 0;  // T
  std::int64_t top_k = 0;       // K
  std::int64_t hidden = 0;      // H of the rows that the plan moves
  Dtype dtype = Dtype::f32;     // dtype of those rows
  // R and D: the sizes that complete() found or, for a bounded plan, its capacities.
  std::int64_t num_rows = 0;
  std::int64_t num_received = 0;
};

// Moves rows for one layer. The constructor and every movement are collective: every rank calls
// them in the same order, with or without tokens. A tensor that does not fit a movement throws
// InvalidArgument on its own rank; the other ranks throw a CommunicationError that quotes it, and
// the communicator is unusable. The communicator must outlive the dispatcher.
class SWITCHYARD_API Dispatcher {
 public:
  Dispatcher(Communicator& comm, ExpertPlacement placement, const DispatcherOptions& options,
             const Device& device = {});
  ~Dispatcher();
  Dispatcher(Dispatcher&&) noexcept;

  // Makes a plan. Collective; see Planner::plan.
  Plan plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token = -1);
  Plan plan(const Routing& routing);

  // Returns the number of i32 words of a plan that is stored in a caller's tensor, for frameworks
  // that keep, save and recompute nothing but tensors. Copying the tensor copies the plan. Requires
  // the peer mover and Overflow::fail. `memory` [plan_words(…)] i32 is contiguous, aligned to 16
  // bytes, and in the device's memory.
  //
  // plan_into() makes the plan with the sizing of the dispatcher; it is collective and does not
  // wait. complete() returns the form of an exact plan with its sizes filled in; it waits, and
  // throws on every rank what plan() would have thrown. The sizes of a bounded plan are its
  // capacities. plan_in() reads the plan, any number of times and for rows of any width. Only
  // plan_into() is collective.
  static std::int64_t plan_words(const ExpertPlacement& placement, int rank,
                                 std::int64_t num_tokens, std::int64_t top_k);
  void plan_into(const ConstTensorView& expert_ids, const TensorView& memory);
  PlanForm complete(const TensorView& memory, const PlanForm& form) const;
  Plan plan_in(const TensorView& memory, const PlanForm& form) const;

  // Computes rows[slot(t, k)] = x[t] and row_weights[slot(t, k)] = weights[t, k].
  void dispatch(const Plan& plan, const DispatchInput& in, const DispatchOutput& out);
  Tensor dispatch(const Plan& plan, const ConstTensorView& x);

  // True if receive() can be called for the plan. With one rank it can, except with the packed
  // mover: tokens stay where they are. With several ranks it requires the peer mover and a plan
  // that drops nothing.
  bool receives_tokens(const Plan& plan) const;
  // Receives tokens instead of dispatching rows, for experts that read their rows from tokens;
  // nothing is permuted. The memory belongs to the dispatcher and stays reserved as long as a view
  // of it exists; at one rank, the results are views of the arguments. Throws Unsupported unless
  // receives_tokens().
  ReceivedTokens receive(const Plan& plan, const ConstTensorView& x,
                         const ConstTensorView& weights);
  // Receives other tokens [T, H] of the same plan and returns them as [D, H], in the same order as
  // before.
  ConstTensorView receive(const Plan& plan, const ConstTensorView& tokens);
  // Returns memory for rows [R, H] that combine and dispatch_backward use without copying it first.
  // Use it on all ranks or on none: otherwise the ranks would be in different calls. Write to it
  // only after dispatch or receive.
  TensorView take_rows(const Plan& plan) const;
  // Return [R] and [D, K] f32 in the same kind of memory, for d_row_weights and d_received_weights
  // of dispatch_backward. take_received_weights requires the peer mover.
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_received_weights(const Plan& plan) const;

  // Computes y[t] = Σ_k weights[t, k] · rows[slot(t, k)], in f32 and in k order.
  void combine(const Plan& plan, const CombineInput& in, const TensorView& y);
  Tensor combine(const Plan& plan, const ConstTensorView& rows, const ConstTensorView& weights);

  // Computes d_rows[slot(t, k)] = weights[t, k] · d_y[t] and
  // d_weights[t, k] = ⟨d_y[t], rows[slot(t, k)]⟩.
  void combine_backward(const Plan& plan, const CombineBackwardInput& in,
                        const CombineBackwardOutput& out);

  // Computes d_x[t] = Σ_k d_rows[slot(t, k)] and d_weights[t, k] = d_row_weights[slot(t, k)].
  void dispatch_backward(const Plan& plan, const DispatchBackwardInput& in,
                         const DispatchBackwardOutput& out);

  // The functions below are not collective.

  // Sets the sizing of subsequent plans. Every rank must give the same.
  void resize(const Sizing& sizing);
  // Fills the views with NaN if an earlier movement of this rank failed but could not throw. For
  // results that the caller computed from rows that never arrived; movements do this to their own
  // outputs.
  void spoil(std::span<const TensorView> views) const;
  MoverKind mover() const;  // the kind that automatic resolved to
  Communicator& communicator() { return comm_; }
  // The number of bytes of rows, weights and slots that this rank has sent to other ranks or
  // exchanged with their memory. Excludes bounded plans on a GPU, whose sizes the host does not
  // know.
  std::int64_t bytes_on_wire() const;

 private:
  PlanMaker& planner() const;
  Mover& moves() const;

  Communicator& comm_;
  std::unique_ptr<PlanMaker> planner_;
  std::unique_ptr<Mover> mover_;
};

}  // namespace switchyard
