// SPDX-License-Identifier: Apache-2.0
// A layer's errors, and that they reach all ranks.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>

#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/error.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard::moe_layer_errors_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::gradients_for;
using testing::Random;
using testing::tiny_layer_options;
using testing::tiny_layer_weights;

constexpr int kRanks = 3;

Tensor zeros(const Shape& shape, Dtype dtype = Dtype::f32) { return Tensor::zeros(shape, dtype); }

// A rank's step, of which a test changes what it likes before it runs.
struct Step {
  explicit Step(Communicator& comm)
      : placement(ExpertPlacement::contiguous(6, comm.size())),
        layer(comm, placement, tiny_layer_options()),
        weights(tiny_layer_weights(tiny_layer_options(), placement, comm.rank())) {}

  ExpertPlacement placement;
  MoeLayer layer;
  MoeWeights weights;
  LayerInput in{.x = Random(1).tensor({5, 6}, Dtype::f32)};
  Tensor y = zeros({5, 6});
  SavedForBackward saved = {};
  ConstTensorView d_y = Random(2).tensor({5, 6}, Dtype::f32);
  Tensor d_x = zeros({5, 6});
  LayerBackwardOutput out{.d_x = d_x, .gradients = gradients_for(weights)};

  void forward() { layer.forward(weights, in, y, &saved); }
  void backward() { layer.backward(weights, saved, d_y, out); }
};

std::string forward_error(const std::function<void(Step&)>& change) {
  const auto world = connect();
  Step step(*world);
  change(step);
  return error_of<InvalidArgument>([&] { step.forward(); });
}

std::string backward_error(const std::function<void(Step&)>& change) {
  const auto world = connect();
  Step step(*world);
  step.forward();
  change(step);
  return error_of<InvalidArgument>([&] { step.backward(); });
}

TEST(MoeLayerErrors, OfOptions) {
  const auto error_with = [](const MoeLayerOptions& options) {
    const auto world = connect();
    return error_of<InvalidArgument>(
        [&] { const MoeLayer layer(*world, ExpertPlacement::contiguous(6, 1), options); });
  };
  auto options = tiny_layer_options();
  options.router.num_experts = 8;
  EXPECT_EQ(error_with(options), "MoeLayer: rank 0: the router has 8 experts, but the placement 6");
  options = tiny_layer_options();
  options.shared_intermediate = -1;
  EXPECT_EQ(error_with(options), "MoeLayer: rank 0: shared_intermediate (-1) must not be negative");
  options = tiny_layer_options();
  options.intermediate = 0;
  EXPECT_EQ(error_with(options), "MoeLayer: rank 0: intermediate (0) must be positive");
  options = tiny_layer_options();
  options.gate_alpha = std::numeric_limits<float>::infinity();
  EXPECT_EQ(error_with(options), "MoeLayer: rank 0: gate_alpha (inf) must be finite");
  options = tiny_layer_options();
  options.router.top_k = 7;
  EXPECT_EQ(error_with(options), "MoeLayer: rank 0: top_k (7) must not exceed num_experts (6)");
}

TEST(MoeLayerErrors, OfOptionsThatDifferBetweenRanks) {
  const auto error_with = [](const std::function<void(MoeLayerOptions&)>& change) {
    std::array<std::string, 2> errors;
    run_ranks(2, [&](Communicator& comm) {
      auto options = tiny_layer_options();
      if (comm.rank() == 1) change(options);
      errors.at(static_cast<std::size_t>(comm.rank())) = error_of<InvalidArgument>(
          [&] { const MoeLayer layer(comm, ExpertPlacement::contiguous(6, 2), options); });
      comm.barrier();  // still works
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  EXPECT_EQ(error_with([](MoeLayerOptions&) {}), "no error");
  EXPECT_EQ(error_with([](MoeLayerOptions& o) { o.intermediate = 5; }),
            "ranks disagree about intermediate: rank 0 has 4, rank 1 has 5");
  EXPECT_EQ(error_with([](MoeLayerOptions& o) { o.intermediate = 0; }),
            "MoeLayer: rank 1: intermediate (0) must be positive");
  EXPECT_EQ(error_with([](MoeLayerOptions& o) { o.keep = Keep::nothing; }),
            "ranks disagree about keep: rank 0 has 0, rank 1 has 2");
  // As doubles.
  EXPECT_EQ(error_with([](MoeLayerOptions& o) { o.gate_alpha = 1.0F; }),
            "ranks disagree about gate_alpha (its bits): rank 0 has 4610343945837215744, rank 1 "
            "has 4607182418800017408");
  EXPECT_EQ(
      error_with([](MoeLayerOptions& o) { o.up_offset = 0.0F; }),
      "ranks disagree about up_offset (its bits): rank 0 has 4607182418800017408, rank 1 has 0");
  EXPECT_EQ(error_with([](MoeLayerOptions& o) {
              o.router.kept_expert_groups = o.router.num_expert_groups = 2;
            }),
            "ranks disagree about num_expert_groups: rank 0 has 1, rank 1 has 2");
}

TEST(MoeLayerErrors, OfForward) {
  EXPECT_EQ(forward_error([](Step&) {}), "no error");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.x = zeros({5, 7});
            }),
            "MoeLayer::forward: x is f32 [5,7], but must be f32 [T,6]");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.x = zeros({5, 6}, Dtype::bf16);
            }),
            "MoeLayer::forward: x is bf16 [5,6], but must be f32 [T,6]");
  EXPECT_EQ(forward_error([](Step& s) { s.in.x = zeros({30}); }),
            "MoeLayer::forward: x is f32 [30], but must be f32 [T,6]");
  EXPECT_EQ(forward_error([](Step& s) {
              s.y = zeros({4, 6});
            }),
            "MoeLayer::forward: y is f32 [4,6], but must be f32 [5,6]");
  EXPECT_EQ(forward_error([](Step& s) { s.in.x = s.y; }),
            "MoeLayer::forward: x and y must not overlap in memory");
  EXPECT_EQ(forward_error([](Step& s) { s.weights.experts.pop_back(); }),
            "MoeLayer::forward: weights for 5 experts were given, but rank 0 owns 6");
  EXPECT_EQ(forward_error([](Step& s) { s.weights.experts[3].up = {}; }),
            "MoeLayer::forward: local expert 3's up [4,6] is missing");
  EXPECT_EQ(forward_error([](Step& s) {
              s.weights.router.gate = zeros({6, 5});
            }),
            "MoeLayer::forward: gate is f32 [6,5], but must be [6,6] of f32 or bf16");
  EXPECT_EQ(forward_error([](Step& s) { s.weights.shared = s.weights.experts[0]; }),
            "MoeLayer::forward: weights of a shared expert were given, but shared_intermediate is "
            "0");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.expert_ids = zeros({4, 2}, Dtype::i32);
            }),
            "MoeLayer::forward: expert_ids is i32 [4,2], but must be i32 or i64 [5,2]");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.expert_ids = zeros({5, 2}, Dtype::i32);
            }),
            "rank 0: expert_ids[0,1] is 0, which the token has picked already");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.expert_weights = zeros({5, 2});
            }),
            "MoeLayer::forward: expert_weights were given without expert_ids: give both");
  EXPECT_EQ(forward_error([](Step& s) {
              s.in.expert_ids = zeros({5, 2}, Dtype::i32);
              s.in.expert_weights = zeros({5, 2}, Dtype::bf16);
            }),
            "MoeLayer::forward: expert_weights is bf16 [5,2], but must be f32 [5,2]");
}

TEST(MoeLayerErrors, OfBackward) {
  EXPECT_EQ(backward_error([](Step&) {}), "no error");
  const auto nothing =
      "MoeLayer::backward: SavedForBackward is empty: each backward needs its own training forward";
  EXPECT_EQ(backward_error([](Step& s) { s.saved = {}; }), nothing);
  EXPECT_EQ(backward_error([](Step& s) { s.backward(); }), nothing);
  EXPECT_EQ(backward_error([](Step& s) { s.d_y = s.d_x; }),
            "MoeLayer::backward: d_y and d_x must not overlap in memory");
  EXPECT_EQ(backward_error([](Step& s) {
              Tensor wide = zeros({5, 3});
              s.out.d_weights = TensorView(wide.data(), Dtype::f32, {5, 2}, 3, wide.view().owner());
            }),
            "MoeLayer::backward: d_weights has row stride 3, but must be contiguous");
  EXPECT_EQ(backward_error([](Step& s) {
              const auto other_world = connect();
              Step other(*other_world);
              other.forward();
              s.saved = std::move(other.saved);
            }),
            "MoeLayer::backward: SavedForBackward was filled by another layer");
  EXPECT_EQ(backward_error([](Step& s) {
              s.d_y = zeros({3, 6});
            }),
            "MoeLayer::backward: d_y is f32 [3,6], but must be f32 [5,6]");
  EXPECT_EQ(backward_error([](Step& s) {
              s.out.d_x = zeros({5, 6}, Dtype::bf16);
            }),
            "MoeLayer::backward: d_x is bf16 [5,6], but must be f32 [5,6]");
  EXPECT_EQ(backward_error([](Step& s) {
              s.out.d_weights = zeros({5, 3});
            }),
            "MoeLayer::backward: d_weights is f32 [5,3], but must be f32 [5,2]");
  EXPECT_EQ(backward_error([](Step& s) { s.out.gradients.router.gate = {}; }),
            "MoeLayer::backward: gate has a weight, but no gradient was given");
  EXPECT_EQ(backward_error([](Step& s) { s.out.gradients.experts.pop_back(); }),
            "MoeLayer::backward: there are 6 experts, but gradients for 5");
  const SavedForBackward nobody;
  EXPECT_EQ(nobody.bytes(), 0);
  const auto empty = "SavedForBackward is empty: run a training forward first";
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)nobody.plan(); }), empty);
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)nobody.routing(); }), empty);
}

TEST(MoeLayerErrors, OfMemoryThatTheDeviceDoesNotWorkIn) {
  const auto refused = [](const std::string& operation, const std::string& tensor) {
    return "MoeLayer::" + operation + ": " + tensor +
           " is in gpu memory, but the device works in host memory; copy it with Device::copy_of";
  };
  const Tensor ids = zeros({5, 2}, Dtype::i32);
  const Tensor valid = zeros({5}, Dtype::i32);
  const auto forward = [&](const std::string& tensor, const std::function<void(Step&)>& change) {
    EXPECT_EQ(forward_error(change), refused("forward", tensor));
  };
  forward("x [5,6]", [](Step& s) { s.in.x = elsewhere(s.in.x); });
  forward("y [5,6]", [](Step& s) { s.y = Tensor::of(elsewhere(s.y.view())); });
  forward("expert_ids [5,2]", [&](Step& s) { s.in.expert_ids = elsewhere(ids.view()); });
  forward("expert_weights [5,2]", [&](Step& s) {
    s.in.expert_ids = ids;
    s.in.expert_weights = elsewhere(zeros({5, 2}).view());
  });
  forward("valid [5]", [&](Step& s) { s.in.valid = elsewhere(valid.view()); });
  forward("gate [6,6]", [](Step& s) { s.weights.router.gate = elsewhere(s.weights.router.gate); });
  forward("local expert 2's down [6,4]",
          [](Step& s) { s.weights.experts[2].down = elsewhere(s.weights.experts[2].down); });
  const auto backward = [&](const std::string& tensor, const std::function<void(Step&)>& change) {
    EXPECT_EQ(backward_error(change), refused("backward", tensor));
  };
  backward("d_y [5,6]", [](Step& s) { s.d_y = elsewhere(s.d_y); });
  backward("d_x [5,6]", [](Step& s) { s.out.d_x = elsewhere(s.out.d_x); });
  backward("d_weights [5,2]", [](Step& s) { s.out.d_weights = elsewhere(zeros({5, 2}).view()); });
  backward("the gradient of gate [6,6]",
           [](Step& s) { s.out.gradients.router.gate = elsewhere(s.out.gradients.router.gate); });
  backward("the gradient of local expert 1's up [4,6]", [](Step& s) {
    s.out.gradients.experts[1].up = elsewhere(s.out.gradients.experts[1].up);
  });
}

// One rank's mistake: itself told what it was, the others who made it. Nobody waits for ever.
void expect_all_learn(const std::string& message, const std::function<void(Step&, bool)>& step) {
  run_ranks(kRanks,
            [&](Communicator& comm) {
              Step mine(comm);
              const auto run = [&] { step(mine, comm.rank() == 1); };
              if (comm.rank() == 1) {
                EXPECT_EQ(error_of<InvalidArgument>(run), message);
              } else {
                const auto seen = error_of<CommunicationError>(run);
                EXPECT_NE(seen.find("rank 1 gave up: " + message), std::string::npos) << seen;
              }
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST(MoeLayerErrors, ReachTheOtherRanks) {
  expect_all_learn("MoeLayer::forward: x is f32 [5,3], but must be f32 [T,6]",
                   [](Step& s, bool bad) {
                     if (bad) s.in.x = zeros({5, 3});
                     s.forward();
                   });
  expect_all_learn("MoeLayer::forward: weights for 1 experts were given, but rank 1 owns 2",
                   [](Step& s, bool bad) {
                     if (bad) s.weights.experts.pop_back();
                     s.forward();
                   });
  expect_all_learn("MoeLayer::forward: expert_ids is i32 [2,2], but must be i32 or i64 [5,2]",
                   [](Step& s, bool bad) {
                     if (bad) s.in.expert_ids = zeros({2, 2}, Dtype::i32);
                     s.forward();
                   });
  expect_all_learn(
      "MoeLayer::forward: expert_weights is f32 [5,3], but must be f32 [5,2]",
      [](Step& s, bool bad) {
        s.in.expert_ids = Tensor::from<std::int32_t>({5, 2}, std::vector<std::int32_t>(10, -1));
        s.in.expert_weights = zeros({5, bad ? 3 : 2});
        s.forward();
      });
  expect_all_learn("MoeLayer::backward: d_y is f32 [4,6], but must be f32 [5,6]",
                   [](Step& s, bool bad) {
                     s.forward();
                     if (bad) s.d_y = zeros({4, 6});
                     s.backward();
                   });
}

// A bounded layer that has too little room says so when it is asked, on every rank alike.
TEST(MoeLayerErrors, OverflowIsToldByCheck) {
  run_ranks(2, [](Communicator& comm) {
    auto options = tiny_layer_options();
    options.sizing = Sizing::bounded(3);
    const auto placement = ExpertPlacement::contiguous(6, 2);
    MoeLayer layer(comm, placement, options);
    const auto weights = tiny_layer_weights(options, placement, comm.rank());
    const Tensor ids = Tensor::from<std::int32_t>({2, 2}, {0, 3, 1, 4});
    (void)layer.forward(weights, {.x = zeros({2, 6}), .expert_ids = ids});
    EXPECT_TRUE(layer.plan_status().overflow);
    EXPECT_EQ(error_of<InvalidArgument>([&] { layer.check(); }),
              "overflow: rank 0 needs 4 rows, but the capacity is 3 on every rank; give the plan a "
              "capacity of at least 4, or exact sizing");
  });
}

// Also those that share no experts, but the sums of a batch.
TEST(MoeLayerErrors, RanksOfABatchMustHaveDevicesOfTheirOwn) {
  const std::array<Device, 2> devices{Device(), Device()};
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    auto options = tiny_layer_options();
    options.mover = MoverKind::peer;
    options.losses.z = true;
    const LayerComms groups{.experts = mesh.comm({"ep"}), .batch = &world};
    const auto at = static_cast<std::size_t>(mesh.coordinate("ep"));
    errors.at(static_cast<std::size_t>(world.rank())) = error_of<InvalidArgument>([&] {
      const MoeLayer layer(groups, ExpertPlacement::contiguous(6, 2), options, devices.at(at));
    });
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error,
              "ranks 0 and 2 share one Device: ranks that use each other's memory need a device of "
              "their own each");
  }
}

}  // namespace
}  // namespace switchyard::moe_layer_errors_test
