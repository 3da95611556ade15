// SPDX-License-Identifier: Apache-2.0
// A whole Mixture-of-Experts layer over the ranks of a communicator, forward and backward.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/capacity.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/experts.h"
#include "switchyard/export.h"
#include "switchyard/losses.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"
#include "switchyard/router.h"
#include "switchyard/sequence.h"

namespace switchyard {

struct MoeLayerData;
struct Saved;

// Selects what a training forward keeps for backward, besides x, the routing and the plan.
enum class Keep {
  // Keeps the experts' inner values and, with several ranks, the received rows (with the peer
  // mover, the received tokens).
  rows,
  // Keeps the experts' inner values. Backward dispatches the rows again.
  activations,
  // Keeps neither. Backward dispatches the rows again and recomputes the inner values.
  nothing,
};

// Options of a MoeLayer.
struct MoeLayerOptions {
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  RouterOptions router = {};
  Dtype dtype = Dtype::f32;  // dtype of tokens and weights: f32 or bf16
  Activation activation = Activation::swiglu;
  WeightStage weight_stage = WeightStage::output;
  // This and the next two are as in ExpertsOptions, and also apply to the shared expert.
  float clamp_limit = 7.0F;
  float gate_alpha = 1.702F;
  float up_offset = 1.0F;
  std::int64_t shared_intermediate = 0;  // 0: no shared expert
  Activation shared_activation = Activation::swiglu;
  LossOptions losses = {};
  Capacity capacity = {};
  GradientScale gradient_scale = GradientScale::off;

  Sizing sizing = {};
  std::int64_t alignment = 1;
  MoverKind mover = MoverKind::automatic;
  CombineMode combine = CombineMode::per_assignment;
  Keep keep = Keep::rows;
  SentinelIds sentinel_ids = SentinelIds::reject;  // for LayerInput::expert_ids

  SWITCHYARD_API ExpertsOptions experts() const;
  SWITCHYARD_API ExpertsOptions shared_expert() const;
};

// The communicators of a layer. Every rank of each communicator takes part in the layer, and the
// ranks of `experts` and `sequence` lie within the batch. The communicators must outlive the layer.
// An error that all ranks of an expert group share (non-finite logits, bad ids) leaves `experts`
// usable; the other communicators become unusable only if their ranks would wait for that group.
// Any other error makes communicators of several ranks unusable: all of them in training, only
// `experts` in inference.
struct LayerComms {
  Communicator& experts;  // the ranks that the experts are divided over
  // The ranks whose tokens make up the batch, for options named `global` and for statistics. Null:
  // the ranks of `experts`.
  Communicator* batch = nullptr;
  // The ranks that sequences are split over, for BalanceLoss::sequence. Null: sequences are whole.
  Communicator* sequence = nullptr;
};

// The input of one forward.
struct LayerInput {
  ConstTensorView x;  // [T, H]; T may differ between ranks and be 0
  // Expert ids to use instead of the router's choice, [T, K] i32 or i64; −1 means no pick.
  std::optional<ConstTensorView> expert_ids = {};
  // Routing weights of expert_ids, [T, K] f32, for callers with their own router. Requires
  // expert_ids, and options without losses. The layer's own router is then not used: its weights
  // may be omitted, its gradients are left unchanged, and d_x excludes its part.
  // LayerBackwardOutput::d_weights receives the gradients of these weights. Weights of padding and
  // of −1 are ignored.
  std::optional<ConstTensorView> expert_weights = {};
  // Marks padding with 0, [T] i32. Padding is neither routed nor counted, its rows of y and d_x are
  // 0, and its rows of x and d_y are ignored.
  std::optional<ConstTensorView> valid = {};
  // How x is split into sequences. Required in training with BalanceLoss::sequence.
  std::optional<SequenceShard> sequence = {};
};

// The state that one training forward leaves for its backward, in the device's memory. x is not
// copied, so the caller must keep it valid and unchanged until backward.
class SWITCHYARD_API SavedForBackward {
 public:
  SavedForBackward();
  ~SavedForBackward();
  SavedForBackward(SavedForBackward&&) noexcept;
  SavedForBackward& operator=(SavedForBackward&&) noexcept;

  // The number of bytes of device memory held, including x; 0 if nothing is saved.
  std::int64_t bytes() const;
  // The plan of the forward. This and the next two throw InvalidArgument if no forward has filled
  // this object, or backward has consumed it.
  const Plan& plan() const;
  // The routing, before capacity drops picks.
  const Routing& routing() const;
  // The losses of the forward; 0 for those that the layer's options do not include. Waits for a GPU
  // on every call, because the step may have been replayed.
  RouterLosses losses() const;

 private:
  friend class MoeLayer;
  std::unique_ptr<Saved> data_;
};

// The gradients that backward starts from.
struct LayerBackwardInput {
  ConstTensorView d_y;         // [T, H]
  RouterLosses d_losses = {};  // the weights of the layer's losses in the training loss
};
// The tensors that backward writes.
struct LayerBackwardOutput {
  TensorView d_x;  // [T, H]
  // The router's and the shared expert's over this rank's tokens; the experts' over the tokens of
  // all ranks.
  MoeGradients gradients;
  GradientMode mode = GradientMode::overwrite;
  std::optional<TensorView> d_weights = {};  // [T, K] f32: gradients of the routing weights
};

// Statistics of the last forward and of the backward that followed it.
struct SWITCHYARD_API LayerStats {
  // A part of a pass and the time that it took.
  struct Stage {
    std::string_view name;
    double seconds = 0.0;
  };

  std::vector<std::int64_t> rows_by_expert;   // [E] over all ranks, after MoeLayerOptions::capacity
  std::vector<std::int64_t> rows_by_rank;     // [ranks] received by each, excluding dropped ones
  std::vector<std::int64_t> bytes_by_expert;  // [E] of rows_by_expert
  std::vector<std::int64_t> bytes_by_rank;    // [ranks] of rows_by_rank
  std::vector<std::int64_t> dropped_by_rank;  // [ranks] assignments that did not fit a bounded plan
  // Assignments of this rank that MoeLayerOptions::capacity dropped.
  std::int64_t over_capacity = 0;
  bool overflow = false;
  // Bytes of rows, weights and slots that this rank exchanged; 0 for bounded plans on GPUs.
  std::int64_t bytes_on_wire = 0;
  std::vector<Stage> forward;   // in order; on a GPU, only with CudaOptions::time_stages
  std::vector<Stage> backward;  // in order
  // Seconds that this rank waited for each rank to arrive in collectives of the communicator,
  // [ranks]. Excludes waits of devices in peer memory, which are not measured.
  std::vector<double> waited_for;
};

// How often training picked each expert.
struct PickCounts {
  std::vector<std::int64_t> picks;  // [E] assignments to each expert, before capacity
  std::int64_t num_tokens = 0;      // excluding padding
};

// A Mixture-of-Experts layer over the ranks of a communicator, forward and backward. The
// constructor, forward and backward are collective: every rank calls them in the same order, with
// or without tokens. y, d_x, d_weights and the experts' gradients have the same bits for every
// number of ranks of `comm` and of threads, unless an option says otherwise. This does not cover
// gradients that are then summed over data-parallel copies, which agree to rounding. All tensors
// are in the memory of the layer's device. The communicator must outlive the layer.
//
// On a GPU, a step with bounded sizing never waits for the GPU; with exact sizing, forward waits
// once. Results that depend on the routing stay on the GPU: pick_counts(), stats(), plan_status()
// and check() fetch them on every call, which waits.
//
// Tensors that do not fit throw InvalidArgument on their own rank; the other ranks throw a
// CommunicationError that quotes it.
class SWITCHYARD_API MoeLayer {
 public:
  MoeLayer(Communicator& comm, const ExpertPlacement& placement, const MoeLayerOptions& options,
           Device device = {});
  // Makes a layer over several communicators. Collective over all of them; every rank gives the
  // same options.
  MoeLayer(const LayerComms& comms, const ExpertPlacement& placement,
           const MoeLayerOptions& options, Device device = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;

  // Computes y [T, H] for inference and keeps nothing. Non-finite logits and bad ids throw the same
  // InvalidArgument on every rank; with bounded sizing they are reported by plan_status() instead.
  Tensor forward(const MoeWeights& weights, const LayerInput& in);
  // Computes y [T, H] for training and fills `saved`.
  Tensor forward(const MoeWeights& weights, const LayerInput& in, SavedForBackward& saved);
  // Computes into the caller's y [T, H]. Keeps nothing if `saved` is null.
  void forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
               SavedForBackward* saved);

  // Computes the gradients of a training forward, given the same weights. Consumes `saved`, and
  // counts its picks in the statistics.
  void backward(const MoeWeights& weights, SavedForBackward& saved, const LayerBackwardInput& in,
                const LayerBackwardOutput& out);
  void backward(const MoeWeights& weights, SavedForBackward& saved, const ConstTensorView& d_y,
                const LayerBackwardOutput& out) {
    backward(weights, saved, LayerBackwardInput{.d_y = d_y}, out);
  }

  // Counts the picks of a training forward, for callers that do not call backward(). A forward is
  // counted once, here or in backward; evaluation and recomputed forwards are not counted.
  void commit_pick_counts(SavedForBackward& saved);
  // The counts of this rank since the last take_pick_counts().
  PickCounts pick_counts() const;
  // Returns the counts summed over all ranks of the batch, and resets them. Collective over the
  // batch. Call it once per step, for LoadBalancer::update.
  PickCounts take_pick_counts();

  LayerStats stats() const;
  // The status of the last forward's plan. Only informative with bounded sizing, because an exact
  // plan throws.
  PlanStatus plan_status() const;
  // Throws InvalidArgument, the same on every rank, if the last plan reports bad ids, non-finite
  // logits, or an overflow with Overflow::fail. On an overflow, y lacks the rows that did not fit.
  void check() const;
  const MoeLayerOptions& options() const;
  const ExpertPlacement& placement() const;
  Communicator& communicator() const;  // that of the experts

 private:
  friend bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step);
  MoeLayerData& data() const;

  std::unique_ptr<MoeLayerData> data_;
};

// Runs step() and repeats it with exact sizing if a bounded layer overflowed on any rank.
// Collective over the ranks of the layers' batch. step() may run the layers any number of times,
// forward and backward. After a repeat, the results are those of a step that was exact from the
// start, the statistics count that step only once, and the capacity of the layers that overflowed
// has grown for the next step. Returns true if the step was repeated.
//
// step() must be repeatable: it overwrites its results instead of accumulating into them, and
// leaves optimizer steps, take_pick_counts() and check() to the code after run_step. List every
// bounded layer that it runs, at least once; all of them share one batch. Layers with
// Overflow::drop do not cause a repeat, but are exact during a repeat caused by another layer.
//
// On a GPU, step() may replay a graph captured from it. A graph has fixed sizes, so step() must
// check layer.options().sizing: if that is exact, run eagerly; if the capacity has grown, capture
// again.
//
// Bad ids and non-finite logits throw the same InvalidArgument on every rank. Any other error of
// step() is thrown on its own rank only; the other ranks are told, and communicators of several
// ranks become unusable. After an error, statistics are as they were before the call.
SWITCHYARD_API bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step);

}  // namespace switchyard
