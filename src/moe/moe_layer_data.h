// What a layer holds, and what a step of it leaves for backward.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/require.h"
#include "moe/layer_stats.h"
#include "switchyard/moe_layer.h"

namespace switchyard {

struct SavedForBackward::Data {
  std::shared_ptr<const int> layer;  // whose it is: held, so that no other gets the same
  ConstTensorView x;
  Routing routing;
  Plan plan;
  std::optional<TensorView> rows = {};
  std::optional<TensorView> hidden = {};
  std::optional<TensorView> shared_hidden = {};
};

struct MoeLayer::Data {
  using Step = SavedForBackward::Data;
  enum class Purpose { inference, training };

  Data(Communicator& comm, const ExpertPlacement& placement, const MoeLayerOptions& options,
       Device device);

  void check_weights(const MoeWeights& weights) const;
  void check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const;

  // Collective; arguments are checked before.
  Step forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
               Purpose purpose);
  void backward(const MoeWeights& weights, Step& step, const ConstTensorView& d_y,
                const LayerBackwardOutput& out);

  // Runs a part that may fail on this rank alone: then the others must not wait for it.
  template <typename Body>
  void announced(std::string_view what, Body body) {
    try {
      body();
    } catch (const CommunicationError&) {
      throw;  // the others know
    } catch (const std::exception& error) {
      comm.abort(fmt::format("{}: {}", what, error.what()));
      throw;
    }
  }

  Communicator& comm;
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

 private:
  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  TensorView take_rows(const Plan& plan, std::int64_t width) const;
  TensorView take_row_weights(const Plan& plan) const;
  TensorView take_shared_hidden(std::int64_t num_tokens) const;

  Step route_and_plan(const MoeWeights& weights, const LayerInput& in, StageClock& clock);
  void forward_experts(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                       StageClock& clock);
  void forward_shared(const MoeWeights& weights, Step& step, const TensorView& y, Purpose purpose,
                      StageClock& clock);
  void backward_experts(const MoeWeights& weights, Step& step, const ConstTensorView& d_y,
                        const LayerBackwardOutput& out, StageClock& clock);
  void backward_shared(const MoeWeights& weights, Step& step, const ConstTensorView& d_y,
                       const LayerBackwardOutput& out, StageClock& clock);
  void note_waits();

  std::vector<std::chrono::nanoseconds> waited_before_;  // as the last forward began
};

}  // namespace switchyard
