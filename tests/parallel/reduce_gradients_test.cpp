// SPDX-License-Identifier: Apache-2.0
// Checks the sums of reduce_gradients with numbers that differ by rank.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/marked_gradients.h"
#include "support/ranks.h"
#include "switchyard/parallelize.h"
#include "switchyard/run_ranks.h"

namespace switchyard::reduce_gradients_test {
namespace {

using testing::filled;
using testing::for_each_tensor;
using testing::gradients_of;
using testing::is_filled;
using testing::mark_of;
using testing::on_ranks;
using testing::RankCase;
using testing::same_bits;

float marks_of(Communicator& world, Communicator& comm) {
  Tensor sum = filled({1}, mark_of(world.rank()));
  comm.all_reduce(sum);
  return sum.span<float>()[0];
}

void expect_sums(const MoeGradients& gradients, float experts, float replicated) {
  for (const auto& expert : gradients.experts) {
    for_each_tensor(expert, [&](const TensorView& v) { EXPECT_TRUE(is_filled(v, experts)); });
  }
  EXPECT_TRUE(is_filled(gradients.router.gate, replicated));
  EXPECT_TRUE(is_filled(gradients.router.gate_bias, replicated));
  for_each_tensor(gradients.shared,
                  [&](const TensorView& v) { EXPECT_TRUE(is_filled(v, replicated)); });
}

class ReduceGradientsTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(ReduceGradientsTest, EveryAxisHasItsPart) {
  on_ranks(GetParam(), [](Communicator& world) {
    const int half = world.size() % 2 == 0 ? 2 : 1;
    const int rest = world.size() / half;
    struct Case {
      std::vector<MeshAxis> mesh;
      GradientAxes axes;
      std::vector<std::string> experts;     // that the experts are divided over
      std::vector<std::string> copies;      // that their gradients are added over
      std::vector<std::string> replicated;  // that the others' are added over
    };
    const std::vector<Case> cases{
        {{{"dp", half}, {"ep", rest}}, {}, {"ep"}, {"dp"}, {"dp", "ep"}},
        {{{"ep", half}, {"sp", rest}}, {}, {"ep"}, {"sp"}, {"ep", "sp"}},
        {{{"ep", half}, {"sp", rest}}, {.experts = {"ep", "sp"}}, {"ep", "sp"}, {}, {"ep", "sp"}},
        {{{"pp", half}, {"ep", rest}}, {}, {"ep"}, {}, {"ep"}},
        {{{"pp", half}, {"dp", rest}}, {}, {}, {"dp"}, {"dp"}},
        {{{"dp", half}, {"tp", rest}}, {}, {}, {"dp"}, {"dp"}},
        {{{"tp", half}, {"ep", rest}}, {}, {"ep"}, {}, {"ep"}},
        {{{"ep", half}, {"tp", rest}}, {.experts = {"ep", "tp"}}, {"ep", "tp"}, {}, {"ep", "tp"}},
        {{{"cp", half}, {"x", rest}}, {.tokens = {"x"}, .repeats = {"cp"}}, {}, {"x"}, {"x"}},
        {{{"stage", half}, {"x", rest}},
         {.experts = {"x"}, .pipeline = {"stage"}},
         {"x"},
         {},
         {"x"}}};
    for (const Case& c : cases) {
      Mesh mesh(world, c.mesh);
      auto gradients = gradients_of(mesh, c.experts);
      reduce_gradients(gradients.views(), mesh, c.axes);
      const float replicated = marks_of(world, mesh.comm(c.replicated));
      expect_sums(gradients.views(), marks_of(world, mesh.comm(c.copies)), replicated);
      Tensor rest_of_model = filled({3}, mark_of(world.rank()));
      const std::vector<TensorView> views{rest_of_model, {}};
      reduce_replicated(views, mesh, c.axes);
      EXPECT_TRUE(is_filled(rest_of_model, replicated));
    }
  });
}

// Numbers whose sum depends on the order, in tensors that lie in every possible way.
TEST_P(ReduceGradientsTest, AddsInRankOrderWhereverTensorsLie) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"dp", world.size()}});
    const auto values_of = [](int rank, Dtype dtype) {
      return testing::Random(static_cast<std::uint64_t>(rank)).tensor({6, 5}, dtype);
    };
    Tensor wide = values_of(world.rank(), Dtype::f32);
    const TensorView columns(wide.data(), Dtype::f32, {6, 3}, 5, wide.view().owner());
    Tensor whole = values_of(world.rank(), Dtype::f32);
    Tensor half = values_of(world.rank(), Dtype::bf16);
    const std::vector<TensorView> views{columns, half, whole, Tensor({0, 4}, Dtype::f32)};
    reduce_replicated(views, mesh);
    Tensor sum = values_of(0, Dtype::f32);
    Tensor half_sum({6, 5}, Dtype::f32);
    for (std::size_t i = 0; i < 30; ++i) {
      float narrow = to_float(values_of(0, Dtype::bf16).span<Bfloat16>()[i]);
      for (int r = 1; r < world.size(); ++r) {
        sum.span<float>()[i] += values_of(r, Dtype::f32).span<float>()[i];
        narrow += to_float(values_of(r, Dtype::bf16).span<Bfloat16>()[i]);
      }
      half_sum.span<float>()[i] = to_float(to_bfloat16(narrow));
      EXPECT_EQ(to_float(half.span<Bfloat16>()[i]), half_sum.span<float>()[i]);
      const auto own = values_of(world.rank(), Dtype::f32).span<float>()[i];
      EXPECT_EQ(wide.span<float>()[i], i % 5 < 3 ? sum.span<float>()[i] : own);
    }
    EXPECT_TRUE(same_bits(whole, sum));
  });
}

// Any number of tensors takes one sum per dtype and one exchange of checks.
TEST_P(ReduceGradientsTest, LaysSmallTensorsSideBySide) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"dp", world.size()}});
    Communicator& comm = mesh.comm({"dp"});
    std::vector<TensorView> views;
    for (int i = 0; i < 50; ++i) {
      views.push_back(Tensor::zeros({i}, i % 2 == 0 ? Dtype::f32 : Dtype::bf16));
    }
    const auto before = comm.sequence();
    reduce_replicated(views, mesh);
    EXPECT_EQ(comm.sequence() - before, world.size() == 1 ? 0U : 3U);
  });
}

TEST_P(ReduceGradientsTest, CostsNothingWhereNobodyElseHasACopy) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh stages(world, {{"pp", world.size()}});
    auto gradients = gradients_of(stages, {});
    reduce_gradients(gradients.views(), stages);  // compares axes
    const auto before = world.sequence();
    reduce_gradients(gradients.views(), stages);
    EXPECT_EQ(world.sequence(), before);
    expect_sums(gradients.views(), mark_of(world.rank()), mark_of(world.rank()));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReduceGradientsTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

// More than a sum takes at once: tensors are cut, the last piece holds the end of one and another.
TEST(ReduceGradients, CutsLargeTensors) {
  run_ranks(2, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}});
    Tensor small = filled({3}, 1.0F);
    Tensor large({9, std::int64_t{1} << 20}, Dtype::f32);  // 36 MiB
    const auto values = large.span<float>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(i % 8191 + static_cast<std::size_t>(world.rank()));
    }
    Communicator& comm = mesh.comm({"dp"});
    const auto before = comm.sequence();
    const std::vector<TensorView> views{small, large, small.view().slice(0, 0)};
    reduce_replicated(views, mesh);
    EXPECT_EQ(comm.sequence() - before, 3U);
    EXPECT_TRUE(is_filled(small, 2.0F));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      wrong += values[i] == static_cast<float>(2 * (i % 8191) + 1) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0U);
  });
}

// Both ways are known after the first two calls: no more is said to the world.
TEST(ReduceGradients, AxesMayChangeFromCallToCall) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"pp", 2}, {"dp", 2}});
    std::uint64_t before = 0;
    for (int i = 0; i < 6; ++i) {
      if (i == 2) before = world.sequence();
      Tensor tensor = filled({2}, 1.0F);
      const std::vector<TensorView> views{tensor};
      const bool staged = i % 2 == 0;
      reduce_replicated(
          views, mesh,
          {.pipeline = staged ? std::vector<std::string>{"pp"} : std::vector<std::string>{},
           .tokens = {"dp", "pp"}});
      EXPECT_TRUE(is_filled(tensor, staged ? 2.0F : 4.0F));
    }
    EXPECT_EQ(world.sequence(), before);
  });
}

}  // namespace
}  // namespace switchyard::reduce_gradients_test
