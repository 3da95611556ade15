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

// What a training forward keeps for backward, besides x, the routing and the plan.
enum class Keep {
  rows,         // the experts' inner values; at several ranks the received rows too
  activations,  // the experts' inner values; rows are dispatched again in backward
  nothing,      // rows are dispatched, and the inner values computed, again in backward
};

struct MoeLayerOptions {
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  RouterOptions router = {};
  Dtype dtype = Dtype::f32;  // of tokens and weights: f32 or bf16
  Activation activation = Activation::swiglu;
  WeightStage weight_stage = WeightStage::output;
  float clamp_limit = 7.0F;  // these three as in ExpertsOptions, for the shared expert too
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
  SentinelIds sentinel_ids = SentinelIds::reject;  // among LayerInput::expert_ids

  SWITCHYARD_API ExpertsOptions experts() const;
  SWITCHYARD_API ExpertsOptions shared_expert() const;
};

// Who takes part in a layer: every rank of every group, and groups lie within the batch.
// Communicators must outlive the layer. An error that the ranks of one group of experts share
// (logits that are not finite, bad ids) leaves the others usable unless their ranks would wait for
// it; any other makes all communicators of several ranks unusable.
struct LayerComms {
  Communicator& experts;  // the ranks that experts are divided over
  // The ranks whose tokens make up the batch, for what is `global`, and for statistics; null: those
  // of `experts`.
  Communicator* batch = nullptr;
  // The ranks that sequences are cut over, for BalanceLoss::sequence; null: they are whole.
  Communicator* sequence = nullptr;
};

struct LayerInput {
  ConstTensorView x;  // [T, H]; T may differ between ranks and be 0
  // [T, K] i32 or i64, −1 = no pick: replays a choice.
  std::optional<ConstTensorView> expert_ids = {};
  // [T, K] f32, only with expert_ids: their routing weights, for callers that have a router of
  // their own. Then the layer's takes no part: its weights may be left out, its gradients are left
  // alone, d_x lacks its part, and LayerBackwardOutput::d_weights are the gradients of these. The
  // layer's options must have no losses. Weights of padding and of −1 are not looked at.
  std::optional<ConstTensorView> expert_weights = {};
  // [T] i32: 0 marks padding. It is neither routed nor counted, its rows of y and d_x are 0, and
  // what x and d_y hold there is not looked at.
  std::optional<ConstTensorView> valid = {};
  // How x is cut into sequences; needed in training with BalanceLoss::sequence.
  std::optional<SequenceShard> sequence = {};
};

// What one training forward leaves for its backward, in the device's memory. x itself is not
// copied: its memory must stay as it is until then.
class SWITCHYARD_API SavedForBackward {
 public:
  SavedForBackward();
  ~SavedForBackward();
  SavedForBackward(SavedForBackward&&) noexcept;
  SavedForBackward& operator=(SavedForBackward&&) noexcept;

  // Memory of the device that is held, x included.
  std::int64_t bytes() const;
  // Only after a forward.
  const Plan& plan() const;
  const Routing& routing() const;  // before capacity
  // 0 where the layer's options have none. Waits for a GPU, at every call: the step may have been
  // replayed.
  RouterLosses losses() const;

 private:
  friend class MoeLayer;
  std::unique_ptr<Saved> data_;
};

struct LayerBackwardInput {
  ConstTensorView d_y;         // [T, H]
  RouterLosses d_losses = {};  // the gradients of what is trained by the layer's losses
};
struct LayerBackwardOutput {
  TensorView d_x;          // [T, H]
  MoeGradients gradients;  // the router's and the shared expert's over this
                           // rank's tokens, the experts' over everybody's
  GradientMode mode = GradientMode::overwrite;
  std::optional<TensorView> d_weights = {};  // [T, K] f32: of the routing weights
};

// What happened in the last forward, and the backward after it.
struct SWITCHYARD_API LayerStats {
  struct Stage {
    std::string_view name;
    double seconds = 0.0;
  };

  std::vector<std::int64_t> rows_by_expert;   // [E] over all ranks, within the options' capacity
  std::vector<std::int64_t> rows_by_rank;     // [ranks] received by each, without what was dropped
  std::vector<std::int64_t> bytes_by_expert;  // [E] of those rows
  std::vector<std::int64_t> bytes_by_rank;    // [ranks] likewise
  std::vector<std::int64_t> dropped_by_rank;  // [ranks] assignments that found no room
  std::int64_t over_capacity = 0;  // assignments of this rank that capacity dropped before that
  bool overflow = false;
  // Rows, weights and slots that this rank exchanged; 0 for bounded plans on GPUs.
  std::int64_t bytes_on_wire = 0;
  std::vector<Stage> forward;   // in order; on a GPU those that CudaOptions::time_stages times
  std::vector<Stage> backward;  // in order
  // [ranks] seconds that this rank waited for each to arrive, in collectives of the communicator:
  // where devices meet in peer memory, these wait, and nobody counts it.
  std::vector<double> waited_for;
};

// What training counted.
struct PickCounts {
  std::vector<std::int64_t> picks;  // [E] assignments to each expert, before capacity
  std::int64_t num_tokens = 0;      // without padding
};

// All tensors are in the memory of the layer's device. On a GPU a step with bounded sizing
// never waits for it: what only the routing knows is read when it is asked for, anew by every
// call of pick_counts(), stats(), plan_status() and check(), which wait. With exact sizing forward
// waits once.
//
// The constructor, forward and backward are collective: every rank calls them in the same order,
// with or without tokens. y, d_x, d_weights and the experts' gradients have the same bits at every
// number of ranks and threads. The communicator must outlive the layer.
class SWITCHYARD_API MoeLayer {
 public:
  MoeLayer(Communicator& comm, const ExpertPlacement& placement, const MoeLayerOptions& options,
           Device device = {});
  // As above for one communicator. Every rank of all of them makes the layer, with the same
  // options.
  MoeLayer(const LayerComms& comms, const ExpertPlacement& placement,
           const MoeLayerOptions& options, Device device = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;

  // For inference: keeps nothing. Logits that are not finite, and bad ids, are the same
  // InvalidArgument on every rank, or a status of a bounded plan.
  Tensor forward(const MoeWeights& weights, const LayerInput& in);
  // For training.
  Tensor forward(const MoeWeights& weights, const LayerInput& in, SavedForBackward& saved);
  // Into y [T, H]; keeps nothing if `saved` is null.
  void forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
               SavedForBackward* saved);

  // With the weights of the forward. Uses `saved` up, and counts its picks in the statistics.
  void backward(const MoeWeights& weights, SavedForBackward& saved, const LayerBackwardInput& in,
                const LayerBackwardOutput& out);
  void backward(const MoeWeights& weights, SavedForBackward& saved, const ConstTensorView& d_y,
                const LayerBackwardOutput& out) {
    backward(weights, saved, LayerBackwardInput{.d_y = d_y}, out);
  }

  // Counts what a training forward routed, for callers whose backward is not ours. A forward counts
  // once, here or in backward; evaluation and a forward that is computed again do not count.
  void commit_pick_counts(SavedForBackward& saved);
  // What this rank has counted since it last took them.
  PickCounts pick_counts() const;
  // Collective over the batch's ranks: what all of them have counted; counting begins anew. Once a
  // step, for LoadBalancer::update.
  PickCounts take_pick_counts();

  LayerStats stats() const;
  // The status of the last forward's plan, for bounded sizing.
  PlanStatus plan_status() const;
  // Throws InvalidArgument, the same on every rank, if that reports bad ids, logits that are not
  // finite, or an overflow that is not to be dropped: then y lacks what found no room.
  void check() const;
  const MoeLayerOptions& options() const;
  const ExpertPlacement& placement() const;
  Communicator& communicator() const;  // of the experts

 private:
  friend bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step);
  MoeLayerData& data() const;

  std::unique_ptr<MoeLayerData> data_;
};

// Collective over the ranks of the layers' batch. Runs step(), which may run these layers any
// number of times, forward and backward. If a layer of bounded sizing overflowed in it, on any
// rank, the step is run again with exact sizing, and the layer's capacity has grown for the next:
// the results are then those of a step that was exact from the beginning, and statistics are what
// they were before plus what that step counted. Returns whether it ran again.
//
// So step() must be repeatable: it writes its results rather than adding to what was there, and
// leaves optimizer steps, take_pick_counts() and check() to what follows. All bounded layers that
// it runs must be listed, once or more; they share one batch. Layers that are to drop rows do not
// make a step run again, but are exact too when another layer does.
//
// On a GPU the step may replay a graph that was captured from it. A graph has the sizes
// it was captured with: so the step looks at layer.options().sizing, runs eagerly where that is
// exact, and captures anew where the capacity has grown.
//
// Bad ids and logits that are not finite are an InvalidArgument, the same on every rank. Any other
// error of step() is this rank's own; the others learn of it, and the layers' groups of several
// ranks are unusable. After an error statistics are as before.
SWITCHYARD_API bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step);

}  // namespace switchyard
