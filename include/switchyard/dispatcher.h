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

// How rows travel.
enum class MoverKind {
  // At one rank direct; between GPUs peer; on CPUs direct where the communicator maps memory,
  // otherwise packed.
  automatic,
  direct,  // written to and read from their slots in the memory of other ranks; on CPUs
  // Over all_to_all; a token goes to a rank once, however many experts it picked there. On CPUs.
  packed,
  // Through memory that devices write for each other, without their hosts; a token goes to a rank
  // once. Ranks are threads of one process, or processes of one host.
  peer,
};

// What travels back from the experts.
enum class CombineMode {
  per_assignment,  // one row an assignment, added at home in k order: the same at every EP size
  // One row a token and rank, added at the rank: fewer bytes, other bits at other EP sizes. Only
  // for the packed mover; for combine and dispatch_backward.
  pre_reduced,
};

struct DispatcherOptions {
  PlanOptions plan = {};
  MoverKind mover = MoverKind::automatic;
  CombineMode combine = CombineMode::per_assignment;
};

// T tokens and K picks of this rank, H elements a row, R = plan.row_capacity() rows of this rank.
// x, y and their gradients are [T, H]; rows and their gradients [≥ R, H], contiguous; all of the
// plan's dtype. Weights are [T, K] and row weights [≥ R], contiguous f32. All of them are in the
// memory of the dispatcher's device.
struct DispatchInput {
  ConstTensorView x;
  std::optional<ConstTensorView> weights = {};  // to travel with the rows
};
struct DispatchOutput {
  TensorView rows;  // pad rows become 0; rows beyond plan.num_rows() are left as they are
  std::optional<TensorView> row_weights = {};  // of pad rows: 0
};
struct CombineInput {
  ConstTensorView rows;
  std::optional<ConstTensorView> weights = {};  // none: 1
};
struct CombineBackwardInput {
  ConstTensorView d_y;
  std::optional<ConstTensorView> weights = {};  // as in combine
  std::optional<ConstTensorView> rows = {};     // as in combine; needed for d_weights
};
struct CombineBackwardOutput {
  TensorView d_rows;  // pad rows become 0
  std::optional<TensorView> d_weights = {};
};
struct DispatchBackwardInput {
  ConstTensorView d_rows;
  // [≥ R], or of received tokens [D, K]: one of them at most, and the same on all ranks that own
  // experts.
  std::optional<ConstTensorView> d_row_weights = {};
  std::optional<ConstTensorView> d_received_weights = {};
};
struct DispatchBackwardOutput {
  TensorView d_x;
  std::optional<TensorView> d_weights = {};
};

// Tokens that a rank has received from all ranks, each once, and which of them every row is: what
// ExpertsInput::tokens takes. D is how many there are, or those there is room for.
struct ReceivedTokens {
  ConstTensorView tokens;       // [D, H]
  ConstTensorView weights;      // [D, K]
  ConstTensorView row_sources;  // [R] i32: d·K + k
};

// How to read a plan that lies in a tensor of the caller's.
struct PlanForm {
  std::int64_t num_tokens = 0;  // T
  std::int64_t top_k = 0;       // K
  std::int64_t hidden = 0;      // H of the rows that it moves
  Dtype dtype = Dtype::f32;     // of these rows
  // R and D: what the plan was found to need, or the capacities that it was made with.
  std::int64_t num_rows = 0;
  std::int64_t num_received = 0;
};

// The movement of one layer. The constructor and every movement are collective: every rank calls
// them in the same order, with or without tokens. The communicator must outlive the dispatcher.
class SWITCHYARD_API Dispatcher {
 public:
  Dispatcher(Communicator& comm, ExpertPlacement placement, const DispatcherOptions& options,
             const Device& device = {});
  ~Dispatcher();
  Dispatcher(Dispatcher&&) noexcept;

  // As Planner::plan.
  Plan plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token = -1);
  Plan plan(const Routing& routing);

  // A plan in one tensor of the caller's, for frameworks that keep, save and recompute tensors and
  // nothing else; only with the peer mover, and with Overflow::fail. Copying the tensor copies the
  // plan. `memory` [plan_words(…)] i32 is contiguous, on 16 bytes, in the device's memory.
  //
  // plan_into() makes the plan with the sizing of the dispatcher, and waits for nothing. plan_in()
  // reads it, as often as one likes, for rows of any width. The sizes of an exact plan are found by
  // complete(), which throws what plan() would have, the same on every rank. (waits) Those of a
  // bounded one are its capacities. plan_into() alone is collective.
  static std::int64_t plan_words(const ExpertPlacement& placement, int rank,
                                 std::int64_t num_tokens, std::int64_t top_k);
  void plan_into(const ConstTensorView& expert_ids, const TensorView& memory);
  PlanForm complete(const TensorView& memory, const PlanForm& form) const;
  Plan plan_in(const TensorView& memory, const PlanForm& form) const;

  // rows[slot(t, k)] = x[t], and row_weights[slot(t, k)] = weights[t, k].
  void dispatch(const Plan& plan, const DispatchInput& in, const DispatchOutput& out);
  Tensor dispatch(const Plan& plan, const ConstTensorView& x);

  // Whether receive() can be called for a plan: at one rank (but for the packed mover), where
  // tokens stay where they are, and with the peer mover unless rows may be dropped.
  bool receives_tokens(const Plan& plan) const;
  // In place of dispatch, for experts that read rows from tokens: nothing is permuted. The memory
  // is the dispatcher's while a view of it is kept.
  ReceivedTokens receive(const Plan& plan, const ConstTensorView& x,
                         const ConstTensorView& weights);
  // Other tokens [T, H] of the same plan, in the places of the first: [D, H].
  ConstTensorView receive(const Plan& plan, const ConstTensorView& tokens);
  // Rows [R, H] that combine and dispatch_backward need not copy first: on all ranks, or on none,
  // since ranks would be in different calls otherwise. Write to them after dispatch or receive.
  TensorView take_rows(const Plan& plan) const;
  // Likewise [R] and [D, K] f32: for d_row_weights and d_received_weights of dispatch_backward.
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_received_weights(const Plan& plan) const;

  // y[t] = Σ_k weights[t, k] · rows[slot(t, k)], in f32, k in order.
  void combine(const Plan& plan, const CombineInput& in, const TensorView& y);
  Tensor combine(const Plan& plan, const ConstTensorView& rows, const ConstTensorView& weights);

  // d_rows[slot(t, k)] = weights[t, k] · d_y[t]; d_weights[t, k] = ⟨d_y[t], rows[slot(t, k)]⟩.
  void combine_backward(const Plan& plan, const CombineBackwardInput& in,
                        const CombineBackwardOutput& out);

  // d_x[t] = Σ_k d_rows[slot(t, k)]; d_weights[t, k] = d_row_weights[slot(t, k)].
  void dispatch_backward(const Plan& plan, const DispatchBackwardInput& in,
                         const DispatchBackwardOutput& out);

  // These are not collective.

  // The sizing of the plans that follow; every rank gives the same.
  void resize(const Sizing& sizing);
  // NaN for all of these, if a movement of this rank has failed and could not throw: what a program
  // has computed of rows that never came. Movements do it to what they write.
  void spoil(std::span<const TensorView> views) const;
  MoverKind mover() const;  // what automatic became
  Communicator& communicator() { return comm_; }
  // Bytes of rows, weights and slots that this rank has sent to others so far, or exchanged with
  // their memory; without those of bounded plans on a GPU, which the host does not know.
  std::int64_t bytes_on_wire() const;

 private:
  PlanMaker& planner() const;
  Mover& moves() const;

  Communicator& comm_;
  std::unique_ptr<PlanMaker> planner_;
  std::unique_ptr<Mover> mover_;
};

}  // namespace switchyard
