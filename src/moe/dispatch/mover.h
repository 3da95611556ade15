// The two movements that the four operations of a dispatcher are made of, and their scalars.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "device/device_backend.h"
#include "moe/plan/plan_maker.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Tokens to slots: dispatch and combine_backward.
struct Scatter {
  ConstTensorView tokens;                             // [T, H]
  std::optional<ConstTensorView> scale = {};          // [T, K]: row = scale · token
  TensorView rows;                                    // out
  std::optional<ConstTensorView> token_scalars = {};  // [T, K] to travel along,
  std::optional<TensorView> row_scalars = {};         // to these
  std::optional<ConstTensorView> dot_rows = {};       // rows to multiply with the tokens,
  std::optional<TensorView> dots = {};                // giving these [T, K]
};

// Slots to tokens: combine and dispatch_backward.
struct Gather {
  ConstTensorView rows;
  std::optional<ConstTensorView> weights = {};      // [T, K]
  TensorView tokens;                                // out [T, H] = Σ_k weights · row
  std::optional<ConstTensorView> row_scalars = {};  // to be fetched
  std::optional<TensorView> token_scalars = {};     // into these [T, K]
  bool scalars_by_source = false;  // row_scalars is [D, K] of what was received, not [R]
};

// Collective; arguments are checked before. At one rank the direct mover needs no communicator.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual MoverKind kind() const = 0;
  Plan plan(PlanMaker& planner, const ConstTensorView& expert_ids, const PlanProblems& problems) {
    const auto data = planner.plan(expert_ids, problems);
    prepare(*data);
    return plan_of(data);
  }
  virtual void scatter(const Plan& plan, const Scatter& args) = 0;
  virtual void gather(const Plan& plan, const Gather& args) = 0;
  virtual std::int64_t bytes_on_wire() const = 0;

  // Whether the two functions that follow take the place of a scatter.
  virtual bool receives(const Plan& plan) const = 0;
  virtual ReceivedTokens receive(const Plan& plan, const ConstTensorView& tokens,
                                 const ConstTensorView& weights);
  // Tokens of a plan whose weights and sources have been received.
  virtual ConstTensorView receive(const Plan& plan, const ConstTensorView& tokens);
  // Memory for rows and scalars that the mover then neither copies in nor out. It is written only
  // after a scatter or a receive.
  virtual TensorView take(const Shape& shape, Dtype dtype) const = 0;
  // NaN for all of these, if a movement of this rank has failed and could not throw.
  virtual void spoil(std::span<const TensorView> /*views*/) const {}
  // Throws what a movement before this could not.
  virtual void check() const {}

 private:
  // Adds to a new plan what this mover needs to know.
  virtual void prepare(PlanData& /*plan*/) {}
};

// Collective: all ranks must move alike, and then what cannot be done is refused on all of them.
MoverKind choose_mover(Communicator& comm, const DispatcherOptions& options, const Device& device);
inline Exchange exchange_of(MoverKind kind) {
  return kind == MoverKind::peer ? Exchange::peer_memory : Exchange::host;
}
// Of the kind that was chosen, for the plans of a planner that exchanges accordingly.
std::unique_ptr<Mover> make_mover(MoverKind kind, Communicator& comm, CombineMode combine,
                                  const PlanMaker& planner, const Device& device);
std::unique_ptr<Mover> make_direct_mover(Communicator& comm, const Device& device);
std::unique_ptr<Mover> make_packed_mover(Communicator& comm, CombineMode combine,
                                         const Device& device);
std::unique_ptr<Mover> make_peer_mover(std::shared_ptr<PeerMeetings> meetings,
                                       const Device& device);

// For the scatter that fills the last of a rank's rows.
inline PadRows pads_of(const Plan& plan, const TensorView& rows,
                       const std::optional<TensorView>& scalars) {
  return {rows, scalars, plan.row_offsets(), plan.group_rows()};
}

// For the rows of received tokens, and their weights if wanted.
inline FillRows rows_of(const Plan& plan, const ReceivedTokens& received, const TensorView& rows,
                        const std::optional<TensorView>& row_weights) {
  return {.tokens = {received.tokens, received.row_sources, plan.top_k()},
          .weights = row_weights ? std::optional(received.weights) : std::nullopt,
          .row_offsets = plan.row_offsets(),
          .group_rows = plan.group_rows(),
          .rows = rows,
          .row_weights = row_weights};
}

inline const std::int32_t* indices(const ConstTensorView& table) {
  return reinterpret_cast<const std::int32_t*>(table.data());
}
inline const float* floats_of(const std::optional<ConstTensorView>& view) {
  return view ? reinterpret_cast<const float*>(view->data()) : nullptr;
}
inline float* floats_of(const std::optional<TensorView>& view) {
  return view ? reinterpret_cast<float*>(view->data()) : nullptr;
}

}  // namespace switchyard
