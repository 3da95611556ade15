// SPDX-License-Identifier: Apache-2.0
// Errors about losses, capacity, scales, padding and statistics, and the ranks they reach.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>

#include "device/router_sums.h"
#include "support/device/forwarding_device.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/error.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard::layer_training_errors_test {
namespace {

using testing::error_of;
using testing::ForwardingDevice;
using testing::gradients_for;
using testing::LayerAlone;
using testing::Random;
using testing::tiny_layer_options;
using testing::tiny_layer_weights;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::string options_error(const std::function<void(MoeLayerOptions&)>& change) {
  auto options = tiny_layer_options();
  change(options);
  const auto world = connect();
  return error_of<InvalidArgument>(
      [&] { const MoeLayer layer(*world, ExpertPlacement::contiguous(6, 1), options); });
}

TEST(LayerTrainingErrors, OfOptions) {
  EXPECT_EQ(options_error([](auto& o) { o.capacity.factor = -0.5; }),
            "MoeLayer: rank 0: capacity.factor (-0.5) must be 0 or positive, and finite");
  EXPECT_EQ(options_error([](auto& o) { o.capacity.factor = kNan; }),
            "MoeLayer: rank 0: capacity.factor (nan) must be 0 or positive, and finite");
  EXPECT_EQ(options_error([](auto& o) {
              o.gradient_scale = GradientScale::global;
              o.weight_stage = WeightStage::input;
            }),
            "MoeLayer: rank 0: gradient_scale does not work with weight_stage input, which applies "
            "the weights before the experts: use output or activation");
}

// Refuses what comes from the hosts, as a GPU does whose step is being captured: sums are uploaded,
// sequences copied.
class CapturingDevice final : public ForwardingDevice {
 public:
  CapturingDevice() : ForwardingDevice(Device::cpu({.num_threads = 1})) {}

  TensorView take(const Shape& shape, Dtype dtype) const override {
    if (is_capturing && shape == sequences_) refuse();
    return base().take(shape, dtype);
  }
  void upload(std::span<const std::byte> from, const TensorView& to) const override {
    if (is_capturing && to.shape() == totals_) refuse();
    base().upload(from, to);
  }

  mutable bool is_capturing = false;

 private:
  static void refuse() { throw DeviceError("a captured step cannot wait"); }

  const Shape totals_{loss_total_words(6)};
  const Shape sequences_{1, 13};
};

// The error names the group whose sums go through its hosts, which a captured step cannot do.
TEST(LayerTrainingErrors, OfSumsThatHostsMakeInACapturedStep) {
  const auto error_with = [](const MoeLayerOptions& options) {
    std::string error;
    run_ranks(2, [&](Communicator& world) {
      Mesh mesh(world, {{"dp", 2}, {"ep", 1}});
      const auto device = std::make_shared<const CapturingDevice>();
      const bool by_sequence = options.losses.balance == BalanceLoss::sequence;
      const auto placement = ExpertPlacement::contiguous(6, 1);
      MoeLayer layer({.experts = mesh.comm({"ep"}),
                      .batch = &world,
                      .sequence = by_sequence ? &world : nullptr},
                     placement, options, Device(device));
      const auto weights = tiny_layer_weights(options, placement, 0);
      const auto step = [&] {
        SavedForBackward saved;
        (void)layer.forward(weights,
                            {.x = Random(1).tensor({4, 6}, Dtype::f32),
                             .sequence = SequenceShard(1, 8, 2, world.rank())},
                            saved);
      };
      step();
      device->is_capturing = world.rank() == 0;
      try {
        step();
      } catch (const DeviceError& caught) {
        error = caught.what();
      } catch (const CommunicationError&) {  // of the other rank
      }
    });
    return error;
  };
  constexpr std::string_view kSums =
      "the batch's sums go through host memory, because its ranks cannot reach each other's GPU "
      "memory; to capture the step, keep the batch on one host, or use LossScope::rank without "
      "GradientScale::global: a captured step cannot wait";
  auto options = tiny_layer_options();
  options.losses.z = true;
  EXPECT_EQ(error_with(options), kSums);
  options.losses.z = false;
  options.gradient_scale = GradientScale::global;
  EXPECT_EQ(error_with(options), kSums);
  options.gradient_scale = GradientScale::off;
  options.losses.balance = BalanceLoss::sequence;
  EXPECT_EQ(error_with(options),
            "sequences divided over ranks are joined in host memory, because the sequence group "
            "has no peer memory; to capture the step, use BalanceLoss::batch or whole sequences: a "
            "captured step cannot wait");
}

// Ranks of a batch must agree, also those that share no experts.
TEST(LayerTrainingErrors, OfOptionsThatDifferInABatch) {
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    auto options = tiny_layer_options();
    options.losses.z = mesh.coordinate("dp") == 1;
    const LayerComms groups{.experts = mesh.comm({"ep"}), .batch = &world};
    errors.at(static_cast<std::size_t>(world.rank())) = error_of<InvalidArgument>(
        [&] { const MoeLayer layer(groups, ExpertPlacement::contiguous(6, 2), options); });
    world.barrier();  // still works
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, "ranks disagree about losses.z: rank 0 has 0, rank 2 has 1");
  }
}

TEST(LayerTrainingErrors, OfSizingThatDiffersInABatch) {
  std::array<std::string, 2> errors;
  run_ranks(2, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 1}});
    auto options = tiny_layer_options();
    if (world.rank() == 1) options.sizing = Sizing::bounded(-4);
    const LayerComms groups{.experts = mesh.comm({"ep"}), .batch = &world};
    const auto make = [&] {
      const MoeLayer layer(groups, ExpertPlacement::contiguous(6, 1), options);
    };
    const auto at = static_cast<std::size_t>(world.rank());
    errors.at(at) = error_of<InvalidArgument>(make);
    EXPECT_EQ(errors.at(at),
              "MoeLayer: rank 1: capacity (-4) must be a multiple of the alignment (1)");
    if (world.rank() == 1) options.sizing = Sizing::bounded(8);
    EXPECT_EQ(error_of<InvalidArgument>(make),
              "ranks disagree about whether sizing is bounded: rank 0 has 0, rank 1 has 1");
    options.alignment = 0;
    EXPECT_EQ(error_of<InvalidArgument>(make), "MoeLayer: rank 0: alignment (0) must be positive");
  });
}

TEST(LayerTrainingErrors, OfGroupsThatReachBeyondTheBatch) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"ep", 2}, {"sp", 2}});
    const LayerComms groups{.experts = mesh.comm({"ep"}), .sequence = &mesh.comm({"sp"})};
    const auto error = error_of<InvalidArgument>([&] {
      const MoeLayer layer(groups, ExpertPlacement::contiguous(6, 2), tiny_layer_options());
    });
    EXPECT_EQ(error.find("ranks disagree about the number of their batch"), 0U) << error;
  });
}

struct Step {
  explicit Step(const LossOptions& losses) : alone(with(losses)) {}
  static MoeLayerOptions with(const LossOptions& losses) {
    auto options = tiny_layer_options();
    options.losses = losses;
    return options;
  }

  LayerAlone alone;
  LayerInput in{.x = Random(1).tensor({6, 6}, Dtype::f32), .sequence = SequenceShard(2, 3, 1, 0)};
  SavedForBackward saved = {};

  std::string forward() {
    return error_of<InvalidArgument>([&] { (void)alone.layer.forward(alone.weights, in, saved); });
  }
  std::string backward(const RouterLosses& d_losses) {
    Tensor d_x = Tensor::zeros({6, 6}, Dtype::f32);
    const Tensor d_y = Tensor::zeros({6, 6}, Dtype::f32);
    return error_of<InvalidArgument>([&] {
      alone.layer.backward(alone.weights, saved, {.d_y = d_y, .d_losses = d_losses},
                           {.d_x = d_x, .gradients = gradients_for(alone.weights)});
    });
  }
};

constexpr LossOptions kBySequence{.balance = BalanceLoss::sequence};

TEST(LayerTrainingErrors, OfSequences) {
  EXPECT_EQ(Step(kBySequence).forward(), "no error");
  Step none(kBySequence);
  none.in.sequence = {};
  EXPECT_EQ(none.forward(),
            "MoeLayer::forward: losses.balance is sequence, but no sequence was given");
  Step few(kBySequence);
  few.in.sequence = SequenceShard(2, 2, 1, 0);
  EXPECT_EQ(few.forward(), "MoeLayer::forward: x has 6 tokens, but the sequence's shard has 2 · 2");
  Step cut(kBySequence);
  cut.in.sequence = SequenceShard(2, 6, 2, 1);
  EXPECT_EQ(cut.forward(),
            "MoeLayer::forward: the sequence is piece 1 of 2, but this is rank 0 of 1 in the "
            "layer's sequence group");
}

// The ranks that share sequences find it out; those that share experts with them must not wait.
TEST(LayerTrainingErrors, OfSequencesThatDifferReachAllGroups) {
  run_ranks(4,
            [](Communicator& world) {
              Mesh mesh(world, {{"ep", 2}, {"sp", 2}});
              Communicator& experts = mesh.comm({"ep"});
              Communicator& sequence = mesh.comm({"sp"});
              const auto placement = ExpertPlacement::contiguous(6, 2);
              const auto options = Step::with(kBySequence);
              MoeLayer layer({.experts = experts, .batch = &world, .sequence = &sequence},
                             placement, options);
              const SequenceShard shard(2, world.rank() == 0 ? 8 : 4, 2, sequence.rank());
              const Tensor x = Tensor::zeros({shard.num_tokens(), 6}, Dtype::f32);
              SavedForBackward saved;
              const auto weights = tiny_layer_weights(options, placement, experts.rank());
              const auto run = [&] {
                (void)layer.forward(weights, {.x = x, .sequence = shard}, saved);
              };
              const std::string what =
                  "ranks disagree about the sequences' length: rank 0 has 8, rank 1 has 4";
              if (mesh.coordinate("ep") == 0) {
                EXPECT_EQ(error_of<InvalidArgument>(run), what);
              } else {
                const auto seen = error_of<CommunicationError>(run);
                EXPECT_NE(seen.find(what), std::string::npos) << seen;
              }
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST(LayerTrainingErrors, EvaluationNeedsNoSequence) {
  Step step(kBySequence);
  EXPECT_NO_THROW((void)step.alone.layer.forward(step.alone.weights, {.x = step.in.x}));
}

TEST(LayerTrainingErrors, OfPadding) {
  Step step({});
  step.in.valid = Tensor::zeros({5}, Dtype::i32);
  EXPECT_EQ(step.forward(), "MoeLayer::forward: valid is i32 [5], but must be i32 [6]");
  Step real({});
  real.in.valid = Tensor::zeros({6}, Dtype::f32);
  EXPECT_EQ(real.forward(), "MoeLayer::forward: valid is f32 [6], but must be i32 [6]");
  const auto weights =
      tiny_layer_weights(tiny_layer_options(), ExpertPlacement::contiguous(6, 1), 0);
  const Router router(tiny_layer_options().router);
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              (void)router.route(weights.router,
                                 {.x = step.in.x, .valid = Tensor::zeros({7}, Dtype::i32)});
            }),
            "valid is i32 [7], but must be i32 [6]");
}

TEST(LayerTrainingErrors, OfLossGradients) {
  const auto error_with = [](const LossOptions& losses, const RouterLosses& d_losses) {
    Step step(losses);
    EXPECT_EQ(step.forward(), "no error");
    return step.backward(d_losses);
  };
  EXPECT_EQ(error_with({.balance = BalanceLoss::batch, .z = true}, {.balance = 1, .z = 1}),
            "no error");
  EXPECT_EQ(error_with({.z = true}, {.balance = 0.5F}),
            "MoeLayer::backward: d_losses.balance is 0.5, but the layer's options have "
            "losses.balance = none");
  EXPECT_EQ(error_with({}, {.z = 0.5F}),
            "MoeLayer::backward: d_losses.z is 0.5, but the layer's options have no losses.z");
  EXPECT_EQ(error_with({.z = true}, {.z = kNan}),
            "MoeLayer::backward: d_losses.balance (0) and d_losses.z (nan) must be finite");
}

TEST(LayerTrainingErrors, OfStatistics) {
  Step step({});
  EXPECT_EQ(error_of<InvalidArgument>([&] { step.alone.layer.commit_pick_counts(step.saved); }),
            "SavedForBackward is empty: read statistics after a training forward and before its "
            "backward");
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)step.saved.losses(); }),
            "SavedForBackward is empty: run a training forward first");
  EXPECT_EQ(step.forward(), "no error");
  Step other({});
  EXPECT_EQ(error_of<InvalidArgument>([&] { other.alone.layer.commit_pick_counts(step.saved); }),
            "SavedForBackward was filled by another layer");
}

TEST(LayerTrainingErrors, OfCapacitiesThatDifferBetweenRanks) {
  std::array<std::string, 2> errors;
  run_ranks(2, [&](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(4, 2), {.plan = {.hidden = 4}});
    dispatcher.resize(comm.rank() == 0 ? Sizing::exact() : Sizing::bounded(8));
    errors.at(static_cast<std::size_t>(comm.rank())) = error_of<InvalidArgument>([&] {
      (void)dispatcher.plan(Tensor::zeros({1, 1}, Dtype::i32));
    });
  });
  for (const auto& error : errors) {
    EXPECT_EQ(
        error,
        "ranks disagree about the capacity, -1 for exact sizing: rank 0 has -1, rank 1 has 8");
  }
  run_ranks(2, [&](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(4, 2), {.plan = {.hidden = 4}});
    dispatcher.resize(Sizing::bounded(8, comm.rank() == 0 ? Overflow::fail : Overflow::drop));
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)dispatcher.plan(Tensor::zeros({1, 1}, Dtype::i32));
              }),
              "ranks disagree about the overflow policy: rank 0 has 0, rank 1 has 1");
  });
  const auto world = connect();
  Dispatcher aligned(*world, ExpertPlacement::contiguous(4, 1),
                     {.plan = {.hidden = 4, .alignment = 4}});
  EXPECT_EQ(error_of<InvalidArgument>([&] { aligned.resize(Sizing::bounded(6)); }),
            "capacity (6) must be a multiple of the alignment (4)");
}

// In inference nobody else would wait, so nobody else is told.
TEST(LayerTrainingErrors, OfOneGroupOfExpertsLeaveTheBatchUsableInInference) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    Communicator& experts = mesh.comm({"ep"});
    const auto placement = ExpertPlacement::contiguous(6, 2);
    auto options = tiny_layer_options();
    options.losses.z = true;
    MoeLayer layer({.experts = experts, .batch = &world}, placement, options);
    const auto weights = tiny_layer_weights(options, placement, experts.rank());
    Tensor x = Tensor::zeros({3, 6}, Dtype::f32);
    if (world.rank() == 3) x.span<float>()[6] = kNan;
    const auto error = error_of<InvalidArgument>([&] { (void)layer.forward(weights, {.x = x}); });
    EXPECT_EQ(error == "no error", mesh.coordinate("dp") == 0) << error;
    world.barrier();
    experts.barrier();
  });
}

// Only one group of experts meets the NaN; the other must not wait for it in the batch.
TEST(LayerTrainingErrors, OfOneGroupOfExpertsReachTheOthers) {
  run_ranks(4,
            [](Communicator& world) {
              Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
              auto options = tiny_layer_options();
              options.losses.z = true;
              Communicator& experts = mesh.comm({"ep"});
              const auto placement = ExpertPlacement::contiguous(6, 2);
              MoeLayer layer({.experts = experts, .batch = &world}, placement, options);
              const auto weights = tiny_layer_weights(options, placement, experts.rank());
              Tensor x = Tensor::zeros({3, 6}, Dtype::f32);
              if (world.rank() == 3) x.span<float>()[6] = kNan;
              SavedForBackward saved;
              const auto run = [&] {
                for (int i = 0; i < 3; ++i) (void)layer.forward(weights, {.x = x}, saved);
              };
              const std::string what = "the router's logits of token 1 are not finite";
              if (mesh.coordinate("dp") == 1) {
                EXPECT_NE(error_of<InvalidArgument>(run).find(what), std::string::npos);
              } else {
                const auto seen = error_of<CommunicationError>(run);
                EXPECT_NE(seen.find(what), std::string::npos) << seen;
              }
            },
            {.timeout = std::chrono::seconds(20)});
}

}  // namespace
}  // namespace switchyard::layer_training_errors_test
