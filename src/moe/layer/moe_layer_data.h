// What a layer holds, and what a step of it leaves for backward.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/agreement.h"
#include "core/require.h"
#include "device/device_backend.h"
#include "moe/layer/layer_stats.h"
#include "moe/layer/losses.h"
#include "switchyard/moe_layer.h"

namespace switchyard {

// What errors call it.
constexpr std::string_view kForward = "MoeLayer::forward";
constexpr std::string_view kBackward = "MoeLayer::backward";

struct SavedForBackward::Data {
  std::shared_ptr<const int> layer;      // whose it is: held, so that no other gets the same
  ConstTensorView x;                     // zeros for padding
  std::optional<TensorView> valid = {};  // [T] i32, contiguous
  Routing routing;
  Plan plan;
  std::optional<RouterSums> sums = {};  // of a training forward
  bool is_counted = false;              // by the statistics
  std::optional<LossTerms> loss_terms = {};
  mutable RouterLosses losses = {};  // as they were last asked for
  // Of the experts' outputs: [E] f32, and the routing weights multiplied by them [T, K].
  std::optional<TensorView> output_scales = {};
  std::optional<TensorView> scaled_weights = {};
  std::optional<TensorView> rows = {};
  std::optional<TensorView> inner = {};
  std::optional<TensorView> shared_inner = {};

  // What combine weighs with.
  ConstTensorView weights() const {
    return scaled_weights ? ConstTensorView(*scaled_weights) : routing.weights.view();
  }
  std::optional<ConstTensorView> mask() const {
    return valid ? std::optional<ConstTensorView>(*valid) : std::nullopt;
  }
};

// What run_step needs to know of a layer, and to change in it.
struct BoundedLayer {
  const std::vector<Communicator*>& groups;  // the experts' first
  Communicator& batch;
  Dispatcher& dispatcher;
  Sizing& sizing;
  std::int64_t alignment;
  const Device& device;
  const TensorView& statistics;
  const TensorView& statistics_before;
  const std::optional<TensorView>& step_words;
  int num_experts;
  std::int64_t& most_needed_rows;
  std::string& first_problem;

  void resize(const Sizing& new_sizing) const;
  // What is known of the step that now begins, and what is known of the one that has run.
  void forget_step() const;
  void learn_of_step() const;
};

struct MoeLayer::Data {
  using Step = SavedForBackward::Data;
  enum class Purpose { inference, training };

  Data(const LayerComms& groups, const ExpertPlacement& placement, const MoeLayerOptions& options,
       Device device);

  Tensor take_output(const LayerInput& in, Purpose purpose) const;
  void check_weights(const MoeWeights& weights) const;
  void check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const;

  // Collective; arguments are checked before.
  Step forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
               Purpose purpose);
  void backward(const MoeWeights& weights, Step& step, const LayerBackwardInput& in,
                const LayerBackwardOutput& out);
  void commit(Step& step);
  PickCounts take_pick_counts();
  BoundedLayer bounded() {
    return {.groups = groups,
            .batch = batch,
            .dispatcher = dispatcher,
            .sizing = options.sizing,
            .alignment = options.alignment,
            .device = device,
            .statistics = statistics,
            .statistics_before = statistics_before,
            .step_words = step_words,
            .num_experts = options.router.num_experts,
            .most_needed_rows = most_needed_rows,
            .first_problem = first_problem};
  }

  // On a GPU these are read when they are asked for, every time: a graph may have run again.
  const PickCounts& read_pick_counts() const;
  const LayerStats& read_stats() const;
  const PlanStatus& read_status() const;

  // Who must not wait for a rank that fails: in training everybody, since the step is lost.
  std::vector<Communicator*> groups_of(Purpose purpose) const {
    return purpose == Purpose::training ? groups : std::vector<Communicator*>{&comm};
  }
  // Those besides the experts' group that a forward exchanges anything with.
  std::vector<Communicator*> other_groups_of(Purpose purpose) const;

  Communicator& comm;   // of the experts
  Communicator& batch;  // may be the same
  Communicator* sequence;
  std::vector<Communicator*> groups;  // each of them once
  MoeLayerOptions options;
  ExpertPlacement placement;
  Device device;
  Router router;
  Experts experts;
  std::optional<Experts> shared;
  Dispatcher dispatcher;
  std::shared_ptr<const int> identity = std::make_shared<const int>(0);
  mutable LayerStats stats;
  mutable PlanStatus status;
  TensorView statistics;  // [E + 1] i64: picks of every expert, and tokens
  // As run_step found them: kept, so that it takes nothing that a capture in it would look for.
  TensorView statistics_before;
  mutable PickCounts counted;
  std::optional<TensorView> owners;  // [E] i32, where outputs are scaled
  // Over the forwards since run_step began one; on a GPU that is alone, what its plans report.
  std::optional<TensorView> step_words;  // [kStepWords] i64
  std::int64_t most_needed_rows = 0;
  std::string first_problem;

 private:
  bool has_losses() const {
    return options.losses.balance != BalanceLoss::none || options.losses.z;
  }
  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  // Whether experts read tokens where they lie, so that no row is dispatched.
  bool reads_tokens(const MoeWeights& weights) const {
    return comm.size() == 1 && experts.reads_tokens(weights.experts);
  }
  static TokenRows tokens_of(const Step& step) {
    return {.x = step.x, .row_sources = step.plan.row_sources(), .top_k = step.plan.top_k()};
  }
  TensorView take_rows(const Plan& plan, std::int64_t width) const;
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

  Step route_and_plan(const MoeWeights& weights, const LayerInput& in, Purpose purpose,
                      StageClock& clock);
  Routed route(const MoeWeights& weights, const LayerInput& in, Purpose purpose);
  Plan make_plan(const Routed& routed);
  RouterSums make_sums(const LayerInput& in, Purpose purpose) const;
  TensorView within_capacity(const Routing& routing, const RouterSums& sums);
  void note_plan(const Plan& plan);
  void weigh_losses(Step& step, const LayerInput& in);
  void scale_outputs(Step& step);
  ConstTensorView all_picks(const Step& step) const;
  // What the experts read: rows, which are filled here, or tokens; and the same for backward.
  ExpertsInput bring_rows(const MoeWeights& weights, const Step& step, const TensorView& rows,
                          StageClock& clock);
  ExpertsBackwardInput bring_gradients(const MoeWeights& weights, Step& step,
                                       const ConstTensorView& d_y, StageClock& clock);
  void forward_experts(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                       StageClock& clock);
  void forward_shared(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                      StageClock& clock);
  void backward_experts(const MoeWeights& weights, Step& step, const LayerBackwardInput& in,
                        const LayerBackwardOutput& out, StageClock& clock);
  void backward_router(const MoeWeights& weights, const Step& step, const LayerBackwardInput& in,
                       const LayerBackwardOutput& out, StageClock& clock);
  void backward_shared(const MoeWeights& weights, Step& step, const ConstTensorView& d_y,
                       const LayerBackwardOutput& out, StageClock& clock);
  void note_waits();

  std::vector<std::chrono::nanoseconds> waited_before_;  // as the last forward began
  // Of the last forward and backward, on a GPU: what statuses and statistics are read from.
  std::optional<Plan> last_plan_;
  std::optional<TensorView> over_capacity_;  // [1] i64
  std::shared_ptr<StageTimer> forward_timer_, backward_timer_;
};

}  // namespace switchyard
