// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/layer/marked_gradients.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/parallelize.h"
#include "switchyard/run_ranks.h"

namespace switchyard::reduce_gradients_errors_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::filled;
using testing::gradients_of;
using testing::is_filled;

// Four ranks, dp by ep: rank 3 changes its gradients, every rank gets the same error.
void expect_error(const std::function<void(MoeGradients&)>& change, const std::string& expected) {
  run_ranks(4,
            [&](Communicator& world) {
              Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
              auto gradients = gradients_of(mesh, {"ep"}).views();
              if (world.rank() == 3) change(gradients);
              EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_gradients(gradients, mesh); }),
                        "reduce_gradients: " + expected);
              world.barrier();
            },
            {.timeout = testing::kTestTimeout});
}

TEST(ReduceGradientsErrors, AreTheSameOnEveryRank) {
  expect_error([](MoeGradients& g) { g.router.gate_bias = {}; },
               "ranks disagree about the number of replicated gradients: rank 0 has 5, rank 3 has "
               "4");
  expect_error(
      [](MoeGradients& g) {
        g.router.gate = Tensor({6, 7}, Dtype::f32);
      },
      "ranks disagree about replicated gradient 0: rank 0 has gate of the router, f32 [7,6], rank "
      "3 has gate of the router, f32 [6,7]");
  expect_error([](MoeGradients& g) { g.experts.pop_back(); },
               "ranks disagree about the number of gradients of the same experts: rank 1 has 18, "
               "rank 3 has 12");
  expect_error(
      [](MoeGradients& g) {
        g.experts[1].down = Tensor({6, 4}, Dtype::bf16);
      },
      "ranks disagree about gradient of the same experts, number 8: rank 1 has down of local "
      "expert 1, f32 "
      "[6,4], rank 3 has down of local expert 1, bf16 [6,4]");
}

TEST(ReduceGradientsErrors, AGpusMemoryIsNotRead) {
  expect_error([](MoeGradients& g) { g.router.gate = elsewhere(g.router.gate); },
               "rank 3: gradient gate of the router [7,6]" + std::string(testing::kGivenToTheCpu));
  expect_error(
      [](MoeGradients& g) { g.experts[1].down = elsewhere(g.experts[1].down); },
      "rank 3: gradient down of local expert 1 [6,4]" + std::string(testing::kGivenToTheCpu));
}

// As many of the same form, but not of the same things.
TEST(ReduceGradientsErrors, WhatIsNotTheSameIsNotAdded) {
  expect_error([](MoeGradients& g) { std::swap(g.shared.gate_bias, g.shared.up); },
               "ranks disagree about replicated gradient 3: rank 0 has up of the shared expert, "
               "f32 [3,6], rank 3 has down of the shared expert, f32 [6,3]");
}

// Counted once or twice by how they are cut into pieces, were they not refused.
TEST(ReduceGradientsErrors, GradientsThatShareMemory) {
  expect_error([](MoeGradients& g) { g.shared.up = g.shared.gate; },
               "rank 3: gradients gate of the shared expert and up of the shared expert share "
               "memory: list tied parameters only once");
  run_ranks(2,
            [](Communicator& world) {
              Mesh mesh(world, {{"dp", 2}});
              Tensor tensor = filled({4, 4}, 1.0F);
              const TensorView whole = tensor;
              const TensorView left(whole.data(), Dtype::f32, {4, 2}, 4, whole.owner());
              const TensorView right(whole.data() + 8, Dtype::f32, {4, 2}, 4, whole.owner());
              const std::vector<TensorView> tied{left, {}, whole.slice(3, 4)};
              EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_replicated(tied, mesh); }),
                        "reduce_replicated: rank 0: gradients number 0 and number 2 share memory: "
                        "list tied parameters only once");
              EXPECT_TRUE(is_filled(whole, 1.0F));
              const std::vector<TensorView> beside{left, right, whole.slice(1, 1)};
              reduce_replicated(beside, mesh);
              EXPECT_TRUE(is_filled(whole, 2.0F));
            },
            {.timeout = testing::kTestTimeout});
}

// Four ranks, dp by ep; the last has other axes. Afterwards the mesh works as before.
void expect_axes_error(Mesh& mesh, const GradientAxes& other, const std::string& expected) {
  Tensor tensor = filled({2}, 1.0F);
  const std::vector<TensorView> views{tensor};
  const auto axes = mesh.world().rank() == 3 ? other : GradientAxes{};
  EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_replicated(views, mesh, axes); }),
            "reduce_replicated: ranks disagree about axis " + expected);
  EXPECT_TRUE(is_filled(tensor, 1.0F));
  reduce_replicated(views, mesh);
  EXPECT_TRUE(is_filled(tensor, 4.0F));
}

TEST(ReduceGradientsErrors, AxesThatDiffer) {
  const std::string experts = "0: rank 0 has dp for copies, rank 3 has dp for experts";
  const std::string layers = "1: rank 0 has ep for experts, rank 3 has ep for layers";
  const GradientAxes all_experts{.experts = {"dp", "ep"}};
  const GradientAxes stages{.pipeline = {"ep"}};
  const GradientAxes all_stages{.pipeline = {"dp", "ep"}};
  run_ranks(4,
            [&](Communicator& world) {
              for (const bool used : {false, true}) {
                Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
                if (used) mesh.comm({"dp", "ep"});
                expect_axes_error(mesh, all_experts, experts);  // in the first call, and later
                expect_axes_error(mesh, stages, layers);
                expect_axes_error(mesh, all_stages,
                                  "0: rank 0 has dp for copies, rank 3 has dp for layers");
              }
            },
            {.timeout = testing::kTestTimeout});
}

// An axis of unknown meaning, on every rank or on the last alone, in the first call and later.
TEST(ReduceGradientsErrors, AnAxisThatNobodyNamed) {
  const std::string unnamed =
      "GradientAxes does not name axis \"cp\": add it to `tokens` if its ranks have tokens of "
      "their "
      "own, to `repeats` if they do the same with the same tokens, to `experts` or to `pipeline`";
  const std::string twice =
      "GradientAxes has axis \"cp\" in `tokens` and in `repeats`: its ranks have tokens of their "
      "own, or they do the same with the same tokens";
  const GradientAxes both{.tokens = {"dp", "cp"}, .repeats = {"cp"}};
  const GradientAxes sound{.tokens = {"dp", "cp"}};
  run_ranks(4,
            [&](Communicator& world) {
              Mesh mesh(world, {{"dp", 2}, {"cp", 2}});
              Tensor tensor = filled({2}, 1.0F);
              const std::vector<TensorView> views{tensor};
              const auto expect = [&](const GradientAxes& axes, const std::string& message) {
                EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_replicated(views, mesh, axes); }),
                          "reduce_replicated: " + message);
              };
              expect({}, "rank 0: " + unnamed);
              expect(both, "rank 0: " + twice);
              expect(world.rank() == 3 ? GradientAxes{} : sound, "rank 3: " + unnamed);
              EXPECT_TRUE(is_filled(tensor, 1.0F));
              reduce_replicated(views, mesh, sound);
              EXPECT_TRUE(is_filled(tensor, 4.0F));
              expect({}, "rank 0: " + unnamed);
              expect(world.rank() == 3 ? both : sound, "rank 3: " + twice);
              EXPECT_TRUE(is_filled(tensor, 4.0F));
            },
            {.timeout = testing::kTestTimeout});
  run_ranks(1, [&](Communicator& world) {
    Mesh mesh(world, {{"cp", 1}});
    EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_replicated({}, mesh); }),
              "reduce_replicated: " + unnamed);
  });
}

}  // namespace
}  // namespace switchyard::reduce_gradients_errors_test
