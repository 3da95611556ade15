// What a layer holds, what a training forward of it leaves for backward, and the parts of its work
// that have a file each: losses.cpp, layer_stats.cpp and layer_checks.cpp.
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

// What errors call it.
constexpr std::string_view kForward = "MoeLayer::forward";
constexpr std::string_view kBackward = "MoeLayer::backward";

// Zeros in the device's memory, for so many sequences of so many tokens.
RouterSums zero_sums(const Device& device, const LossOptions& losses, std::int64_t num_experts,
                     std::int64_t num_sequences, std::int64_t sequence_tokens);
inline std::int64_t bytes_of(const RouterSums& sums) {
  return sums.by_sequence.bytes() + sums.squares.bytes();
}

// Of one training forward.
class LossTerms {
 public:
  // Collective over `sequence` where sequences are cut over ranks, by way of the hosts, and over
  // the ranks of `batch` where the caller wants totals over them. Either may be null: no others.
  LossTerms(Device device, const RouterSums& sums, std::int64_t top_k, Communicator* sequence,
            const SumOverRanks* batch);

  // [E] i64 in the device's memory, over what the losses are over: the ranks of `batch`, or this
  // one.
  ConstTensorView picks() const { return totals_.slice(0, own_.num_experts); }
  // Besides the sums that were given.
  std::int64_t bytes() const;
  // Waits for the device.
  RouterLosses values() const;
  // What reaches this rank's tokens, when d_losses reach the losses.
  RouterSlopes slopes(const RouterLosses& d_losses) const;

 private:
  void join_over(Communicator& sequence);

  Device device_;
  RouterSums own_;
  // Of sequences cut over ranks: the rows of all ranks that have a part of them.
  std::optional<RouterSums> joined_;
  std::int64_t top_k_;
  TensorView totals_;                     // [loss_total_words(E)] i64
  std::weak_ptr<const PeerCheck> check_;  // of the ranks that they are over
};

// Cuts a call into stages: each call of end() names the time since the one before. On a GPU that is
// the device's own time, which its timer knows later; or nobody's, where it has none.
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
  // The experts' stage, split by what their threads spent.
  void end_experts(const WorkTimes& spent);

 private:
  double since_last();
  void add(std::string_view name, double seconds) { stages_.push_back({name, seconds}); }

  std::vector<LayerStats::Stage>& stages_;
  const bool is_host_;
  StageTimer* timer_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// What a timer, or none, knows by now. Waits for the device.
std::vector<LayerStats::Stage> stages_of(const std::shared_ptr<StageTimer>& timer);

// What the plan says about rows, drops and overflow.
void describe_plan(const Plan& plan, LayerStats& stats);

// What a forward leaves for backward.
struct Saved {
  std::shared_ptr<const int> layer;      // whose it is: held, so that no other gets the same
  ConstTensorView x;                     // zeros for padding
  std::optional<TensorView> valid = {};  // [T] i32, contiguous
  Routing routing;
  bool is_routing_given = false;  // its weights too: the router takes no part
  Plan plan;
  std::optional<RouterSums> sums = {};  // of a training forward
  bool is_counted = false;              // by the statistics
  std::optional<LossTerms> loss_terms = {};
  // Of the experts' outputs: [E] f32, and the routing weights multiplied by them [T, K].
  std::optional<TensorView> output_scales = {};
  std::optional<TensorView> scaled_weights = {};
  std::optional<TensorView> rows = {};          // that were dispatched,
  std::optional<ReceivedTokens> received = {};  // or tokens; none of them where these are not kept
  std::optional<TensorView> inner = {};
  std::optional<TensorView> shared_inner = {};

  // What combine weighs with.
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
  // Without the router's.
  void check_weights(const MoeWeights& weights) const;
  void check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const;
  void check_router_gradients(const RouterWeights& weights, const RouterGradients& gradients) const;

  // Collective; arguments are checked before.
  Saved forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                Purpose purpose);
  void backward(const MoeWeights& weights, Saved& saved, const LayerBackwardInput& in,
                const LayerBackwardOutput& out);
  void commit(Saved& saved);
  PickCounts take_pick_counts();
  // For run_step: the sizing of the plans that follow; what is known of the step that now begins,
  // and what of the one that has run.
  void resize(const Sizing& sizing);
  void forget_step();
  void learn_of_step();

  // On a GPU these are read when they are asked for, every time: a graph may have run again.
  void check_ranks() const;
  PickCounts read_pick_counts() const;
  LayerStats read_stats() const;
  PlanStatus read_status() const;

  // Who must not wait for a rank that fails: in training everybody, since the step is lost.
  std::vector<Communicator*> comms_of(Purpose purpose) const {
    return purpose == Purpose::training ? comms : std::vector<Communicator*>{&comm};
  }
  // Those besides the experts' that a forward exchanges anything with.
  std::vector<Communicator*> other_comms_of(Purpose purpose) const;

  Communicator& comm;   // of the experts
  Communicator& batch;  // may be the same
  Communicator* sequence;
  std::vector<Communicator*> comms;  // each of them once, the experts' first
  MoeLayerOptions options;
  ExpertPlacement placement;
  Device device;
  Router router;
  Experts experts;
  std::optional<Experts> shared;
  MoverKind mover_kind;
  // Where losses or the scale of outputs are over all of these.
  std::optional<SumOverRanks> sum_over_batch, sum_over_experts;
  PlanMaker planner;
  std::unique_ptr<Mover> mover;
  std::shared_ptr<const int> identity = std::make_shared<const int>(0);
  // On a GPU without what read_stats() and read_status() fetch.
  LayerStats stats;
  PlanStatus status;
  TensorView statistics;  // [E + 1] i64: picks of every expert, and tokens
  // As run_step found them: kept, so that it takes nothing that a capture in it would look for.
  TensorView statistics_before;
  std::optional<TensorView> owners;  // [E] i32, where outputs are scaled
  // Over the forwards since run_step began one; on a GPU, what its plans report.
  std::optional<TensorView> step_words;  // [kStepWords] i64
  std::int64_t most_needed_rows = 0;
  std::int64_t most_needed_tokens = 0;  // where they cross once
  std::string first_problem;

 private:
  bool has_losses() const {
    return options.losses.balance != BalanceLoss::none || options.losses.z;
  }
  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  // Whether tokens are received, and rows read or made from them, instead of being dispatched.
  bool receives(const MoeWeights& weights, const Plan& plan) const {
    return mover->receives(plan) && (comm.size() > 1 || experts.reads_tokens(weights.experts));
  }
  static TokenRows tokens_of(const Saved& saved) {
    return {.x = saved.received->tokens,
            .row_sources = saved.received->row_sources,
            .top_k = saved.plan.top_k()};
  }
  TensorView take_rows(const Plan& plan, std::int64_t width) const;
  // The same for what ranks read and write of each other.
  TensorView take_moved_rows(const Plan& plan) const;
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_shared_inner(std::int64_t num_tokens) const;

  // What comes before a plan.
  struct Routed {
    ConstTensorView x;                     // zeros for padding
    std::optional<TensorView> valid = {};  // [T] i32, contiguous
    Routing routing = {};
    std::optional<RouterSums> sums = {};      // where training or capacity needs them
    std::optional<TensorView> kept_ids = {};  // what capacity left

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
  // What the experts read: rows, which are filled here, or tokens; and the same for backward.
  ExpertsInput bring_rows(const MoeWeights& weights, Saved& saved, const TensorView& rows,
                          StageClock& clock);
  ExpertsBackwardInput bring_gradients(const MoeWeights& weights, Saved& saved,
                                       const ConstTensorView& d_y, StageClock& clock);
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
  ExpertsBackwardInput receive_gradients(const MoeWeights& weights, Saved& saved,
                                         const ConstTensorView& d_y, StageClock& clock);
  // NaN, where ranks have failed whom this layer's devices waited for; and what then is thrown.
  void spoil(std::span<const TensorView> views) const;
  void spoil(const MoeGradients& gradients) const;
  void note_waits();

  std::vector<std::chrono::nanoseconds> waited_before_;  // as the last forward began
  // Of the last forward and backward, on a GPU: what statuses and statistics are read from.
  std::optional<Plan> last_plan_;
  std::optional<TensorView> over_capacity_;  // [1] i64
  std::shared_ptr<StageTimer> forward_timer_, backward_timer_;
};

void require_valid(const MoeLayerOptions& o, const ExpertPlacement& placement);
// Collective.
void require_same_options(Communicator& comm, const MoeLayerOptions& o,
                          const ExpertPlacement& placement);
// Collective over all of them: what is summed over the batch is summed over all their ranks.
void require_within_batch(const LayerComms& comms);
// Sequences are cut over a communicator's ranks as the layer's input says.
void require_sequence(const LayerInput& in, const Communicator* comm);
void require_ids(const LayerInput& in, const MoeLayerOptions& o, Memory memory);
void require_given_weights(const LayerInput& in, const MoeLayerOptions& o, Memory memory);
void require_loss_gradients(const RouterLosses& given, const LossOptions& options);

// [T,H]: it says what T is.
void require_x(const ConstTensorView& x, const MoeLayerOptions& o, Memory memory);

// What a tensor with one entry a token must be.
struct TokenForm {
  Shape shape;
  Dtype dtype;
  Memory memory;
};
void require_tokens(const ConstTensorView& view, const TokenForm& form, std::string_view name);

// Each of them once.
std::vector<Communicator*> distinct_comms(const LayerComms& comms);

}  // namespace switchyard
