// SPDX-License-Identifier: Apache-2.0
// The two movements, scatter and gather, that implement the four operations of a dispatcher.
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

// From tokens to slots: dispatch and combine_backward.
struct Scatter {
  ConstTensorView tokens;                             // [T, H]
  std::optional<ConstTensorView> scale = {};          // [T, K]: row = scale · token
  TensorView rows;                                    // out
  std::optional<ConstTensorView> token_scalars = {};  // [T, K]: sent along with the rows
  std::optional<TensorView> row_scalars = {};         // out [R]: receives token_scalars
  std::optional<ConstTensorView> dot_rows = {};       // [R, H]: multiplied with the tokens
  std::optional<TensorView> dots = {};  // out [T, K]: the dot products of tokens and dot_rows
};

// From slots to tokens: combine and dispatch_backward.
struct Gather {
  ConstTensorView rows;
  std::optional<ConstTensorView> weights = {};      // [T, K]
  TensorView tokens;                                // out [T, H] = Σ_k weights · row
  std::optional<ConstTensorView> row_scalars = {};  // fetched along with the rows
  std::optional<TensorView> token_scalars = {};     // out [T, K]: receives row_scalars
  bool scalars_by_source = false;  // row_scalars is [D, K], for the received tokens, instead of [R]
};

// Moves rows between ranks. Plans and movements are collective; the caller has checked the
// arguments. At one rank the direct mover does not use the communicator.
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

  // True if receive() can replace a scatter for this plan.
  virtual bool receives(const Plan& plan) const = 0;
  virtual ReceivedTokens receive(const Plan& plan, const ConstTensorView& tokens,
                                 const ConstTensorView& weights);
  // Receives other tokens for a plan whose weights and sources were received before.
  virtual ConstTensorView receive(const Plan& plan, const ConstTensorView& tokens);
  // Takes memory for rows and scalars that the mover can use without copying them in or out. The
  // caller writes to it only after a scatter or a receive.
  virtual TensorView take(const Shape& shape, Dtype dtype) const = 0;
  // Fills the views with NaN if a movement of this rank has failed without being able to throw.
  virtual void spoil(std::span<const TensorView> /*views*/) const {}
  // Throws the error of an earlier movement that could not throw itself.
  virtual void check() const {}

 private:
  // Adds the data that this mover needs to a new plan.
  virtual void prepare(PlanData& /*plan*/) {}
};

// Collective. Chooses the mover. Throws the same error on every rank if ranks disagree or the
// options are not supported.
MoverKind choose_mover(Communicator& comm, const DispatcherOptions& options, const Device& device);
inline Exchange exchange_of(MoverKind kind) {
  return kind == MoverKind::peer ? Exchange::peer_memory : Exchange::host;
}
// Makes a mover of the chosen kind. `planner` must have been made with exchange_of(kind).
std::unique_ptr<Mover> make_mover(MoverKind kind, Communicator& comm, CombineMode combine,
                                  const PlanMaker& planner, const Device& device);
std::unique_ptr<Mover> make_direct_mover(Communicator& comm, const Device& device);
std::unique_ptr<Mover> make_packed_mover(Communicator& comm, CombineMode combine,
                                         const Device& device);
std::unique_ptr<Mover> make_peer_mover(std::shared_ptr<PeerMeetings> meetings,
                                       const Device& device);

// Describes the pad rows that a scatter zeroes. If several scatters fill the same rows, pass it to
// the last one.
inline PadRows pads_of(const Plan& plan, const TensorView& rows,
                       const std::optional<TensorView>& scalars) {
  return {rows, scalars, plan.row_offsets(), plan.group_rows()};
}

// Describes how to fill `rows` from received tokens, and `row_weights` if given.
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
