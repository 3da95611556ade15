// SPDX-License-Identifier: Apache-2.0
// The data of a layer, the data that a training forward saves for backward, and the parts of the
// work that have a file each: losses.cpp, layer_stats.cpp and layer_checks.cpp.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/agreement.h"
#include "core/require.h"
#include "device/device_backend.h"
#include "device/router_sums.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_maker.h"
#include "peer/sum_over_ranks.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/losses.h"
#include "switchyard/moe_layer.h"
#include "switchyard/placement.h"

namespace switchyard {

// The names of the operations in errors.
constexpr std::string_view kForward = "MoeLayer::forward";
constexpr std::string_view kBackward = "MoeLayer::backward";

// Returns zeroed sums in device memory for `num_sequences` sequences of `sequence_tokens` tokens.
RouterSums zero_sums(const Device& device, const LossOptions& losses, std::int64_t num_experts,
                     std::int64_t num_sequences, std::int64_t sequence_tokens);
inline std::int64_t bytes_of(const RouterSums& sums) {
  return sums.by_sequence.bytes() + sums.squares.bytes();
}

// The losses of one training forward.
class LossTerms {
 public:
  // Collective over `sequence` if sequences are split over ranks, in which case the hosts exchange
  // their sums, and over the ranks of `batch` if the caller wants totals over them. Either may be
  // null if no other ranks take part.
  LossTerms(Device device, const RouterSums& sums, std::int64_t top_k, Communicator* sequence,
            const SumOverRanks* batch);

  // [E] i64 in device memory: the picks of each expert over the ranks of `batch`, or on this rank
  // if there is no `batch`.
  ConstTensorView picks() const { return totals_.slice(0, own_.num_experts); }
  // Returns the device memory held, without the sums given to the constructor.
  std::int64_t bytes() const;
  // Returns the losses. Waits for the device.
  RouterLosses values() const;
  // Returns the slopes of this rank's scores, given the gradients `d_losses` of the losses.
  RouterSlopes slopes(const RouterLosses& d_losses) const;

 private:
  void join_over(Communicator& sequence);

  Device device_;
  RouterSums own_;
  // For sequences split over ranks: their sums over all ranks that have a part of them.
  std::optional<RouterSums> joined_;
  std::int64_t top_k_;
  TensorView totals_;                     // [loss_total_words(E)] i64
  std::weak_ptr<const PeerCheck> check_;  // throws if a rank of `batch` has failed
};

// Splits a call into stages: each end() names the time since the previous one. On a GPU the
// device's own timer measures the stages and reports them later; without such a timer nothing is
// measured.
class StageClock {
 public:
  StageClock(const DeviceBackend& device, std::vector<LayerStats::Stage>& stages,
             std::shared_ptr<StageTimer>& timer);
  ~StageClock() {
    if (timer_ != nullptr) timer_->stop();
  }
  StageClock(const StageClock&) = delete;
  StageClock& operator=(const StageClock&) = delete;

  void end(std::string_view name);
  // Ends the experts' stage. On a CPU, splits it into products and the rest as their threads spent
  // it.
  void end_experts(const WorkTimes& spent);

 private:
  double since_last();
  void add(std::string_view name, double seconds) { stages_.push_back({name, seconds}); }

  std::vector<LayerStats::Stage>& stages_;
  const bool is_host_;
  StageTimer* timer_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Returns the stages that the timer measured, or none if it is null. Waits for the device.
std::vector<LayerStats::Stage> stages_of(const std::shared_ptr<StageTimer>& timer);

// Fills in the rows, drops and overflow of the plan.
void describe_plan(const Plan& plan, LayerStats& stats);

// The data that a forward saves for backward.
struct Saved {
  // Identifies the layer. Held so that no other layer can get the same address.
  std::shared_ptr<const int> layer;
  ConstTensorView x;                     // padding is zero
  std::optional<TensorView> valid = {};  // [T] i32, contiguous
  Routing routing;
  bool is_routing_given = false;  // ids and weights are given, so the router is not used
  Plan plan;
  std::optional<RouterSums> sums = {};  // only for a training forward
  bool is_counted = false;              // whether the statistics include this forward
  std::optional<LossTerms> loss_terms = {};
  // The output scales of the experts, [E] f32, and the routing weights [T, K] multiplied by them.
  std::optional<TensorView> output_scales = {};
  std::optional<TensorView> scaled_weights = {};
  std::optional<TensorView> rows = {};  // the dispatched rows, if they are kept
  // The received tokens, if tokens are received. `tokens` itself is empty if it is not kept.
  std::optional<ReceivedTokens> received = {};
  std::optional<TensorView> inner = {};
  std::optional<TensorView> shared_inner = {};

  // The routing weights, multiplied by the output scales if there are any.
  ConstTensorView weights() const {
    return scaled_weights ? ConstTensorView(*scaled_weights) : routing.weights.view();
  }
  std::optional<ConstTensorView> mask() const { return valid; }
};

struct MoeLayerData {
  enum class Purpose { inference, training };

  MoeLayerData(const LayerComms& comms, const ExpertPlacement& placement,
               const MoeLayerOptions& options, Device device);

  Tensor take_output(const LayerInput& in, Purpose purpose) const;
  // These two do not check the router.
  void check_weights(const MoeWeights& weights) const;
  void check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const;
  void check_router_gradients(const RouterWeights& weights, const RouterGradients& gradients) const;

  // Collective. The caller has checked the arguments.
  Saved forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                Purpose purpose);
  void backward(const MoeWeights& weights, Saved& saved, const LayerBackwardInput& in,
                const LayerBackwardOutput& out);
  void commit(Saved& saved);
  PickCounts take_pick_counts();
  // For run_step: set the sizing of later plans, clear what is known of the step before it runs,
  // and read it afterwards.
  void resize(const Sizing& sizing);
  void forget_step();
  void learn_of_step();

  // On a GPU these read anew at every call, since a graph may have been replayed.
  void check_ranks() const;
  PickCounts read_pick_counts() const;
  LayerStats read_stats() const;
  PlanStatus read_status() const;

  // The communicators to abort if this rank fails: in training all of them, since the step is lost.
  std::vector<Communicator*> comms_of(Purpose purpose) const {
    return purpose == Purpose::training ? comms : std::vector<Communicator*>{&comm};
  }
  // The communicators besides the experts' over which a forward exchanges anything.
  std::vector<Communicator*> other_comms_of(Purpose purpose) const;

  Communicator& comm;   // the ranks that share the experts
  Communicator& batch;  // may be the same as `comm`
  Communicator* sequence;
  std::vector<Communicator*> comms;  // every distinct communicator, the experts' first
  MoeLayerOptions options;
  ExpertPlacement placement;
  Device device;
  Router router;
  Experts experts;
  std::optional<Experts> shared;
  MoverKind mover_kind;
  // Set only if losses or output scales are summed over these ranks.
  std::optional<SumOverRanks> sum_over_batch, sum_over_experts;
  PlanMaker planner;
  std::unique_ptr<Mover> mover;
  std::shared_ptr<const int> identity = std::make_shared<const int>(0);
  // On a GPU these lack what read_stats() and read_status() fetch.
  LayerStats stats;
  PlanStatus status;
  TensorView statistics;  // [E + 1] i64: picks of every expert, then the number of tokens
  // A copy of `statistics` from the start of run_step. It is allocated once, so that run_step does
  // not take memory from the pool that a capture inside the step needs.
  TensorView statistics_before;
  std::optional<TensorView> owners;  // [E] i32, only if outputs are scaled
  // Collected over the forwards of the current step. On a GPU the plans report it in step_words.
  std::optional<TensorView> step_words;  // [kStepWords] i64
  std::int64_t most_needed_rows = 0;
  std::int64_t most_needed_tokens = 0;  // only if tokens cross once
  std::string first_problem;

 private:
  bool has_losses() const {
    return options.losses.balance != BalanceLoss::none || options.losses.z;
  }
  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  // True if tokens are received and rows are read or filled from them, instead of dispatching rows.
  bool receives(const Plan& plan) const {
    return mover->receives(plan) && (comm.size() > 1 || experts.reads_tokens());
  }
  static TokenRows tokens_of(const Saved& saved) {
    return {.x = saved.received->tokens,
            .row_sources = saved.received->row_sources,
            .top_k = saved.plan.top_k()};
  }
  TensorView take_rows(const Plan& plan, std::int64_t width) const;
  // These two take memory that other ranks may read and write.
  TensorView take_moved_rows(const Plan& plan) const;
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_shared_inner(std::int64_t num_tokens) const;

  // The result of routing, before the plan is made.
  struct Routed {
    ConstTensorView x;                     // padding is zero
    std::optional<TensorView> valid = {};  // [T] i32, contiguous
    Routing routing = {};
    std::optional<RouterSums> sums = {};      // only if training or capacity needs them
    std::optional<TensorView> kept_ids = {};  // the ids within capacity

    ConstTensorView planned_ids() const {
      return kept_ids ? ConstTensorView(*kept_ids) : routing.expert_ids.view();
    }
  };

  TensorView without_padding(const ConstTensorView& rows, const ConstTensorView& valid) const;

  Saved route_and_plan(const MoeWeights& weights, const LayerInput& in, Purpose purpose,
                       StageClock& clock);
  Routed route(const MoeWeights& weights, const LayerInput& in, Purpose purpose);
  Plan make_plan(const Routed& routed);
  void make_sums_over_ranks();
  RouterSums make_sums(const LayerInput& in, Purpose purpose) const;
  TensorView within_capacity(const Routing& routing, const RouterSums& sums);
  void note_plan(const Plan& plan);
  void weigh_losses(Saved& saved, const LayerInput& in);
  void scale_outputs(Saved& saved);
  ConstTensorView all_picks(const Saved& saved) const;
  // Return the input of the experts in forward and in backward: tokens, or rows, which are filled
  // here.
  ExpertsInput bring_rows(Saved& saved, const TensorView& rows, StageClock& clock);
  ExpertsBackwardInput bring_gradients(Saved& saved, const ConstTensorView& d_y, StageClock& clock);
  void forward_experts(const MoeWeights& weights, Saved& saved, const TensorView& y,
                       Purpose purpose, StageClock& clock);
  void forward_shared(const MoeWeights& weights, Saved& saved, const TensorView& y, Purpose purpose,
                      StageClock& clock);
  void backward_experts(const MoeWeights& weights, Saved& saved, const LayerBackwardInput& in,
                        const LayerBackwardOutput& out, StageClock& clock);
  void backward_router(const MoeWeights& weights, const Saved& saved, const LayerBackwardInput& in,
                       const LayerBackwardOutput& out, StageClock& clock);
  void backward_shared(const MoeWeights& weights, Saved& saved, const ConstTensorView& d_y,
                       const LayerBackwardOutput& out, StageClock& clock);
  ExpertsBackwardInput receive_gradients(Saved& saved, const ConstTensorView& d_y,
                                         StageClock& clock);
  // Fill the tensors with NaN if a rank that this layer's devices waited for has failed.
  void spoil(std::span<const TensorView> views) const;
  void spoil(const MoeGradients& gradients) const;
  void note_waits();

  // comm.waited_for() when the last forward began.
  std::vector<std::chrono::nanoseconds> waited_before_;
  // State of the last forward and backward, from which status and statistics are read on a GPU.
  std::optional<Plan> last_plan_;
  std::optional<TensorView> over_capacity_;  // [1] i64
  std::shared_ptr<StageTimer> forward_timer_, backward_timer_;
};

void require_valid(const MoeLayerOptions& o, const ExpertPlacement& placement);
// Collective.
void require_same_options(Communicator& comm, const MoeLayerOptions& o,
                          const ExpertPlacement& placement);
// Collective over all communicators. Throws unless the experts' and sequence groups lie within one
// batch, since sums over the batch must cover all of their ranks.
void require_within_batch(const LayerComms& comms);
// Throws unless the input has a sequence shard that fits x and this rank of `comm`. A null `comm`
// means that sequences are not split.
void require_sequence(const LayerInput& in, const Communicator* comm);
void require_ids(const LayerInput& in, const MoeLayerOptions& o, Memory memory);
void require_given_weights(const LayerInput& in, const MoeLayerOptions& o, Memory memory);
void require_loss_gradients(const RouterLosses& given, const LossOptions& options);

// Checks x, [T, H], which defines T.
void require_x(const ConstTensorView& x, const MoeLayerOptions& o, Memory memory);

// The form that a tensor with one entry per token must have.
struct TokenForm {
  Shape shape;
  Dtype dtype;
  Memory memory;
};
void require_tokens(const ConstTensorView& view, const TokenForm& form, std::string_view name);

// Returns every distinct communicator, the experts' first.
std::vector<Communicator*> distinct_comms(const LayerComms& comms);

}  // namespace switchyard
