// SPDX-License-Identifier: Apache-2.0
// A layer on a GPU beside the same layer on the CPU, and beside itself at other numbers of ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "device/cuda/gpu_ranks.h"
#include "support/compare.h"
#include "support/errors.h"
#include "support/layer/layer_step.h"
#include "support/random.h"
#include "support/reference/cut.h"
#include "support/wide_ids.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_layer_test {
namespace {

constexpr int kExperts = 7;

struct Form {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  Biases biases = Biases::all;
  WeightStage stage = WeightStage::output;
};

// Some that Hopper's own products take, and some that only the portable ones do. The former read
// rows from tokens.
class CudaLayerTest : public ::testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static MoeLayerOptions options(Dtype dtype) {
    return {.hidden = GetParam().hidden,
            .intermediate = GetParam().intermediate,
            .router = RouterOptions::mixtral(kExperts, 3),
            .dtype = dtype,
            .weight_stage = GetParam().stage,
            .shared_intermediate = 72};
  }
};

Tensor widened(const ConstTensorView& view) {
  Tensor result(view.shape(), Dtype::f32);
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    const auto from = view.slice(r, r + 1);
    const auto to = result.view().slice(r, r + 1).span<float>();
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] =
          view.dtype() == Dtype::f32 ? from.span<float>()[i] : to_float(from.span<Bfloat16>()[i]);
    }
  }
  return result;
}

void widen_into(const ConstTensorView& from, const TensorView& to) {
  if (from.data() == nullptr) return;
  const Tensor wide = widened(from);
  Device().copy(wide, to);
}

// The same numbers as f32.
MoeParameters widened(const MoeParameters& parameters, const MoeLayerOptions& options,
                      const ExpertPlacement& placement, Biases biases) {
  MoeParameters wide(options, placement, 0, biases);
  const auto from = parameters.weights();
  const auto to = wide.views();
  widen_into(from.router.gate, to.router.gate);
  widen_into(from.router.gate_bias, to.router.gate_bias);
  const auto expert = [](const ExpertWeights& a, const ExpertViews& b) {
    widen_into(a.gate, b.gate);
    widen_into(a.up, b.up);
    widen_into(a.down, b.down);
    widen_into(a.gate_bias, b.gate_bias);
    widen_into(a.up_bias, b.up_bias);
    widen_into(a.down_bias, b.down_bias);
  };
  for (std::size_t e = 0; e < to.experts.size(); ++e) expert(from.experts[e], to.experts[e]);
  expert(from.shared, to.shared);
  return wide;
}

LayerResults step_on_gpu(Communicator& comm, const LayerProblem& problem, const MoeLayerOptions& o,
                         Biases biases, const ExpertPlacement& placement,
                         const Device& device = Device::cuda(cuda_options())) {
  MoeLayer layer(comm, placement, o, device);
  const auto weights = MoeParameters::random(o, placement, comm.rank(), 5, biases, device);
  return run_step(layer, weights.weights(),
                  input_of(problem, awkward_piece(comm, problem.num_tokens)), biases, device);
}

LayerResults step_on_gpu(Communicator& comm, const LayerProblem& problem, const MoeLayerOptions& o,
                         Biases biases) {
  return step_on_gpu(comm, problem, o, biases, ExpertPlacement::contiguous(kExperts, comm.size()));
}

// The first and the last rank have all experts between them.
ExpertPlacement uneven(int num_ranks) {
  const int last = num_ranks - 1;
  return ExpertPlacement::from_owners({last, 0, 0, 0, last, 0, last}, num_ranks);
}

// In f32, on the CPU, with the numbers that the GPU has.
LayerResults reference(const LayerProblem& problem, Biases biases) {
  const auto alone = connect();
  const auto placement = ExpertPlacement::contiguous(kExperts, 1);
  auto wide = problem.options;
  wide.dtype = Dtype::f32;
  MoeLayer layer(*alone, placement, wide);
  const auto weights = widened(MoeParameters::random(problem.options, placement, 0, 5, biases),
                               wide, placement, biases);
  StepInput in = input_of(problem, {0, problem.num_tokens});
  in.x = widened(problem.x);
  in.d_y = widened(problem.d_y);
  return run_step(layer, weights.weights(), in, biases);
}

void expect_near(const LayerResults& actual, const LayerResults& expected, double tolerance) {
  EXPECT_TRUE(near(widened(actual.y), expected.y, tolerance)) << "y";
  EXPECT_TRUE(near(widened(actual.d_x), expected.d_x, tolerance)) << "d_x";
  EXPECT_TRUE(near(actual.d_weights, expected.d_weights, tolerance)) << "d_weights";
  for (const auto& [id, e] : actual.experts) {
    SCOPED_TRACE("expert " + std::to_string(id));
    const auto& r = expected.experts.at(id);
    EXPECT_TRUE(near(widened(e.gate), widened(r.gate), tolerance)) << "gate";
    EXPECT_TRUE(near(widened(e.up), widened(r.up), tolerance)) << "up";
    EXPECT_TRUE(near(widened(e.down), widened(r.down), tolerance)) << "down";
    EXPECT_TRUE(near(widened(e.gate_bias), widened(r.gate_bias), tolerance)) << "gate_bias";
    EXPECT_TRUE(near(widened(e.up_bias), widened(r.up_bias), tolerance)) << "up_bias";
    EXPECT_TRUE(near(widened(e.down_bias), widened(r.down_bias), tolerance)) << "down_bias";
  }
}

// Skewed as they come, all to one expert, and evenly.
std::vector<Tensor> routings(const LayerProblem& problem) {
  std::vector<Tensor> all;
  all.push_back(copy_of(problem.ids));
  Tensor one = copy_of(problem.ids);
  Tensor even = copy_of(problem.ids);
  for (std::size_t i = 0; i < one.span<std::int32_t>().size(); ++i) {
    one.span<std::int32_t>()[i] = i % 3 == 0 ? 4 : -1;
    even.span<std::int32_t>()[i] = static_cast<std::int32_t>(i) % kExperts;
  }
  all.push_back(std::move(one));
  all.push_back(std::move(even));
  return all;
}

TEST_P(CudaLayerTest, EqualsTheCpu) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    LayerProblem problem(options(dtype));
    for (auto& ids : routings(problem)) {
      problem.ids = std::move(ids);
      const auto alone = connect();
      const auto expected = reference(problem, GetParam().biases);
      for (const std::int64_t alignment : {1, 128}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", alignment " + std::to_string(alignment));
        auto o = problem.options;
        o.alignment = alignment;
        expect_near(step_on_gpu(*alone, problem, o, GetParam().biases), expected,
                    dtype == Dtype::f32 ? 1e-5 : 8e-3);
      }
    }
  }
}

TEST_P(CudaLayerTest, AnyNumberOfRanksPlacementSizingAndAlignmentEqualsOne) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const LayerProblem problem(options(dtype));
    const auto alone = connect();
    const auto one = step_on_gpu(*alone, problem, problem.options, GetParam().biases);
    EXPECT_TRUE(same_part(step_on_gpu(*alone, problem, problem.options, GetParam().biases),
                          {0, problem.num_tokens}, one))
        << "run to run";
    auto bounded = problem.options;
    bounded.sizing = Sizing::bounded(128 * 30);
    bounded.alignment = 128;
    for (const int ranks : gpu_rank_counts()) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::string(name_of(dtype)));
      on_gpu_ranks(ranks, [&](Communicator& comm, const Device& device) {
        const auto piece = awkward_piece(comm, problem.num_tokens);
        for (const auto& o : {problem.options, bounded}) {
          for (const auto& placement :
               {ExpertPlacement::contiguous(kExperts, ranks), uneven(ranks)}) {
            const auto part = step_on_gpu(comm, problem, o, GetParam().biases, placement, device);
            EXPECT_TRUE(on_all(comm, same_part(part, piece, one)));
          }
        }
      });
    }
  }
}

// The weights have either sign and any sum, unlike a router's.
TEST_P(CudaLayerTest, GivenWeightsEqualTheCpuAndAnyNumberOfRanks) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    LayerProblem problem(options(dtype));
    problem.weights = Random(8).tensor(problem.ids.shape(), Dtype::f32);
    problem.valid = Tensor({problem.num_tokens}, Dtype::i32);
    for (std::size_t t = 0; t < static_cast<std::size_t>(problem.num_tokens); ++t) {
      problem.valid->span<std::int32_t>()[t] = t % 5 == 3 ? 0 : 1;
    }
    const auto ids = problem.ids.span<std::int32_t>();
    for (std::size_t i = 0; i < ids.size(); i += 7) ids[i] = -1;
    const auto alone = connect();
    const auto one = step_on_gpu(*alone, problem, problem.options, GetParam().biases);
    expect_near(one, reference(problem, GetParam().biases), dtype == Dtype::f32 ? 1e-5 : 8e-3);
    auto bounded = problem.options;
    bounded.sizing = Sizing::bounded(128 * 30);
    for (const int ranks : gpu_rank_counts()) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::string(name_of(dtype)));
      on_gpu_ranks(ranks, [&](Communicator& comm, const Device& device) {
        const auto piece = awkward_piece(comm, problem.num_tokens);
        for (const auto& o : {problem.options, bounded}) {
          const auto part = step_on_gpu(comm, problem, o, GetParam().biases,
                                        ExpertPlacement::contiguous(kExperts, ranks), device);
          EXPECT_TRUE(on_all(comm, same_part(part, piece, one)));
        }
      });
    }
    problem.ids = wide_ids(problem.ids, kExperts);
    bounded.sentinel_ids = SentinelIds::allow;
    EXPECT_TRUE(same_part(step_on_gpu(*alone, problem, bounded, GetParam().biases),
                          {0, problem.num_tokens}, one))
        << "ids of 64 bits with sentinels";
  }
}

TEST_P(CudaLayerTest, GivenIdsAndWeightsAreNotWaitedFor) {
  const auto alone = connect();
  auto o = options(Dtype::bf16);
  o.sizing = Sizing::bounded(128 * 30);
  o.sentinel_ids = SentinelIds::allow;
  const LayerProblem problem(o);
  const Device gpu = Device::cuda(cuda_options());
  const auto placement = ExpertPlacement::contiguous(kExperts, 1);
  MoeLayer layer(*alone, placement, o, gpu);
  const auto weights = MoeParameters::random(o, placement, 0, 5, GetParam().biases, gpu);
  MoeParameters gradients(o, placement, 0, GetParam().biases, gpu);
  const Tensor x = gpu.copy_of(problem.x);
  const Tensor ids = gpu.copy_of(wide_ids(problem.ids));
  const Tensor given = gpu.copy_of(Random(8).tensor(problem.ids.shape(), Dtype::f32));
  Tensor y = gpu.empty(x.shape(), x.dtype());
  Tensor d_x = gpu.empty(x.shape(), x.dtype());
  for (int round = 0; round < 2; ++round) {  // the first takes memory
    const auto before = gpu.host_syncs();
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x, .expert_ids = ids, .expert_weights = given}, y,
                  &saved);
    layer.backward(weights.weights(), saved, x, {.d_x = d_x, .gradients = gradients.views()});
    if (round > 0) {
      EXPECT_EQ(gpu.host_syncs(), before);
    }
  }
  layer.check();
}

TEST_P(CudaLayerTest, TensorsOfTheHostAreRefused) {
  const auto alone = connect();
  const auto placement = ExpertPlacement::contiguous(kExperts, 1);
  const auto o = options(Dtype::f32);
  const Device gpu = Device::cuda(cuda_options());
  MoeLayer layer(*alone, placement, o, gpu);
  const auto weights = MoeParameters::random(o, placement, 0, 5, Biases::none, gpu);
  const auto host_weights = MoeParameters::random(o, placement, 0, 5);
  const Tensor x = Random(1).tensor({4, o.hidden}, Dtype::f32);
  const Tensor gpu_x = gpu.copy_of(x);
  const auto message = [&](const MoeWeights& w, const ConstTensorView& tokens) {
    return error_of<InvalidArgument>([&] { layer.forward(w, {.x = tokens}); });
  };
  for (const auto& text : {message(weights.weights(), x), message(host_weights.weights(), gpu_x)}) {
    EXPECT_NE(text.find("is in host memory, but the device works in gpu memory"), std::string::npos)
        << text;
  }
  layer.forward(weights.weights(), {.x = gpu_x});  // nothing is broken
  gpu.synchronize();
}

INSTANTIATE_TEST_SUITE_P(CudaLayer, CudaLayerTest,
                         ::testing::Values(Form{48, 40}, Form{264, 136}, Form{256, 512},
                                           Form{264, 136, Biases::none},
                                           Form{256, 512, Biases::none, WeightStage::activation}),
                         [](const auto& param) {
                           const Form& form = param.param;
                           return std::to_string(form.hidden) + "x" +
                                  std::to_string(form.intermediate) +
                                  (form.biases == Biases::none ? "_without_biases" : "");
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_layer_test
