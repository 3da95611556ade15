// What a layer holds, and what a step of it leaves for backward.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/padding.h"
#include "core/require.h"
#include "moe/check_arguments.h"
#include "moe/layer_stats.h"
#include "moe/losses.h"
#include "switchyard/moe_layer.h"

namespace switchyard {

// What errors call it.
constexpr std::string_view kForward = "MoeLayer::forward";
constexpr std::string_view kBackward = "MoeLayer::backward";

struct SavedForBackward::Data {
  std::shared_ptr<const int> layer;  // whose it is: held, so that no other gets the same
  ConstTensorView x;                 // zeros for padding
  std::optional<Tensor> valid = {};  // [T] i32
  Routing routing;
  Plan plan;
  std::optional<LossTerms> loss_terms = {};
  RouterLosses losses = {};
  std::optional<RouterStatistics> statistics = {};  // not yet committed
  // Of the experts' outputs: [E], and the routing weights multiplied by them [T, K].
  std::vector<float> output_scales = {};
  std::optional<Tensor> scaled_weights = {};
  std::optional<TensorView> rows = {};
  std::optional<TensorView> hidden = {};
  std::optional<TensorView> shared_hidden = {};

  // What combine weighs with.
  const Tensor& weights() const { return scaled_weights ? *scaled_weights : routing.weights; }
};

// What run_step needs to know of a layer, and to change in it.
struct BoundedLayer {
  const std::vector<Communicator*>& groups;  // the experts' first
  Communicator& batch;
  Dispatcher& dispatcher;
  Sizing& sizing;
  std::int64_t alignment;
  RouterStatistics& statistics;
  std::int64_t& most_needed_rows;
  std::string& first_problem;

  void resize(const Sizing& new_sizing) const;
};

struct MoeLayer::Data {
  using Step = SavedForBackward::Data;
  enum class Purpose { inference, training };

  Data(const LayerGroups& groups, const ExpertPlacement& placement, const MoeLayerOptions& options,
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
  RouterStatistics take_statistics();
  BoundedLayer bounded() {
    return {
        groups,           batch,        dispatcher, options.sizing, options.alignment, statistics,
        most_needed_rows, first_problem};
  }

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
  LayerStats stats;
  PlanStatus status;
  RouterStatistics statistics;
  // Over the forwards since run_step began one.
  std::int64_t most_needed_rows = 0;
  std::string first_problem;

 private:
  bool has_losses() const {
    return options.losses.balance != BalanceLoss::none || options.losses.z;
  }
  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  TensorView take_rows(const Plan& plan, std::int64_t width) const;
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_shared_hidden(std::int64_t num_tokens) const;

  // What comes before a plan.
  struct Routed {
    ConstTensorView x;                 // zeros for padding
    std::optional<Tensor> valid = {};  // [T] i32
    Routing routing = {};
    std::optional<RouterSums> sums = {};  // where training or capacity needs them
    std::optional<Tensor> kept_ids = {};  // what capacity left

    std::optional<ConstTensorView> mask() const {
      return valid ? std::optional<ConstTensorView>(*valid) : std::nullopt;
    }
    RouterSums* sums_or_null() { return sums ? &*sums : nullptr; }
    ConstTensorView planned_ids() const { return kept_ids ? *kept_ids : routing.expert_ids; }
  };

  TensorView without_padding(const ConstTensorView& rows, const ConstTensorView& valid) const;

  Step route_and_plan(const MoeWeights& weights, const LayerInput& in, Purpose purpose,
                      StageClock& clock);
  Routed route(const MoeWeights& weights, const LayerInput& in, Purpose purpose);
  Plan make_plan(const Routed& routed);
  void forget_refused(const MoeWeights& weights, const Plan& plan, Routed& routed);
  RouterSums make_sums(const LayerInput& in, Purpose purpose) const;
  Tensor within_capacity(const Routing& routing, const RouterSums& sums);
  void note_status();
  void weigh_losses(Step& step, const LayerInput& in, RouterSums sums);
  void scale_outputs(Step& step);
  void forward_experts(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                       StageClock& clock);
  void forward_shared(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                      StageClock& clock);
  void backward_experts(const MoeWeights& weights, Step& step, const LayerBackwardInput& in,
                        const LayerBackwardOutput& out, StageClock& clock);
  void backward_shared(const MoeWeights& weights, Step& step, const ConstTensorView& d_y,
                       const LayerBackwardOutput& out, StageClock& clock);
  void note_waits();

  std::vector<std::chrono::nanoseconds> waited_before_;  // as the last forward began
};

}  // namespace switchyard
