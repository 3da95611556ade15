// SPDX-License-Identifier: Apache-2.0
// Steps in every order over ranks on one GPU whose kernels come at any time.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "device/cuda/gate.h"
#include "device/cuda/layer_fixture.h"
#include "support/device/forwarding_device.h"
#include "support/layer/layer_step.h"

namespace switchyard::testing::cuda_ranks_order_test {
namespace {

constexpr int kRanks = 4;

// Holds its stream up, for up to a millisecond, before what ranks hand to each other.
class DelayingDevice final : public ForwardingDevice {
 public:
  DelayingDevice(const Device& base, std::uint64_t seed) : ForwardingDevice(base), random_(seed) {}

  void scatter_rows(const ScatterRows& args) const override {
    delay();
    ForwardingDevice::scatter_rows(args);
  }
  void gather_rows(const GatherRows& args) const override {
    delay();
    ForwardingDevice::gather_rows(args);
  }
  void experts_forward(const ExpertsForward& args) const override {
    delay();
    ForwardingDevice::experts_forward(args);
  }
  void experts_backward(const ExpertsBackward& args) const override {
    delay();
    ForwardingDevice::experts_backward(args);
  }
  void meet(const Meet& args) const override {
    delay();
    ForwardingDevice::meet(args);
  }

 private:
  void delay() const {
    const auto sleep = [](void* microseconds) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(reinterpret_cast<std::intptr_t>(microseconds)));
    };
    require_success(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream().handle), sleep,
                                       reinterpret_cast<void*>(random_.below(1000))));
  }

  mutable Random random_;
};

// Two batches, each through one of two layers. F and B are the first one's forward and backward, I
// its inference; f, b and i are the second one's.
struct Sequence {
  std::string name;
  std::string passes;
  std::array<std::size_t, 2> layers = {0, 1};
  Keep keep = Keep::rows;

  bool trains() const { return passes.find('B') != std::string::npos; }
};
std::ostream& operator<<(std::ostream& out, const Sequence& sequence) {
  return out << sequence.name;
}

using Batches = std::array<StepInput, 2>;
using Results = std::array<LayerResults, 2>;

// One rank's part of a sequence, any number of times.
class Passes {
 public:
  Passes(Communicator& comm, const Device& device, const MoeLayerOptions& options,
         const Sequence& sequence, const Batches& batches)
      : device_(device), sequence_(sequence) {
    const auto placement = ExpertPlacement::contiguous(options.router.num_experts, comm.size());
    const Piece piece = awkward_piece(comm, batches[0].x.rows());
    const Biases biases = biases_of(options.dtype);
    layers_.reserve(2);
    for (std::uint64_t i = 0; i < 2; ++i) {
      layers_.emplace_back(comm, placement, options, device);
      weights_.push_back(
          MoeParameters::random(options, placement, comm.rank(), 5 + i, biases, device));
    }
    for (const StepInput& batch : batches) {
      const Shape tokens{piece.last - piece.first, options.hidden};
      const Shape picks{piece.last - piece.first, options.router.top_k};
      batches_.push_back(
          {device.copy_of(copy_of(piece.of(batch.x))), device.copy_of(copy_of(piece.of(batch.d_y))),
           device.copy_of(copy_of(piece.of(batch.ids))), device.empty(tokens, options.dtype),
           device.empty(tokens, options.dtype), device.empty(picks, Dtype::f32),
           MoeParameters(options, placement, comm.rank(), biases, device)});
    }
    all_done(comm, device);
  }

  Results operator()() {
    for (const char pass : sequence_.passes) run_pass(pass);
    device_.synchronize();  // a rank without tokens would run ahead, and CUDA queues few delays
    Results results;
    for (std::size_t i = 0; i < 2; ++i) {
      results[i].y = device_.to_host(batches_[i].y);
      if (!sequence_.trains()) continue;
      results[i].d_x = device_.to_host(batches_[i].d_x);
      results[i].d_weights = device_.to_host(batches_[i].d_weights);
      MoeParameters gradients = batches_[i].gradients.copy_on(Device());
      const MoeLayer& layer = layers_[0];
      const auto mine = layer.placement().experts_of(layer.communicator().rank());
      for (std::size_t e = 0; e < mine.size(); ++e) {
        results[i].experts[mine[e]] = gradients.views().experts[e];
      }
    }
    return results;
  }

 private:
  struct Batch {
    Tensor x, d_y, ids, y, d_x, d_weights;
    MoeParameters gradients;
    SavedForBackward saved = {};
  };

  void run_pass(char pass) {
    const std::size_t i = std::string_view("FBI").find(pass) == std::string_view::npos ? 1 : 0;
    Batch& b = batches_[i];
    MoeLayer& layer = layers_[sequence_.layers[i]];
    const MoeWeights weights = weights_[sequence_.layers[i]].weights();
    const LayerInput in{.x = b.x, .expert_ids = b.ids};
    if (pass == 'B' || pass == 'b') {
      layer.backward(weights, b.saved, b.d_y,
                     {.d_x = b.d_x, .gradients = b.gradients.views(), .d_weights = b.d_weights});
    } else {
      layer.forward(weights, in, b.y, pass == 'F' || pass == 'f' ? &b.saved : nullptr);
    }
  }

  Device device_;
  Sequence sequence_;
  std::vector<MoeLayer> layers_;
  std::vector<MoeParameters> weights_;
  std::vector<Batch> batches_;
};

class CudaRanksOrder : public ::testing::TestWithParam<std::tuple<Sequence, Dtype>> {};

TEST_P(CudaRanksOrder, RanksThatComeAtAnyTimeEqualOne) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  const Sequence& sequence = std::get<0>(GetParam());
  MoeLayerOptions options{.hidden = 64,
                          .intermediate = 128,
                          .router = RouterOptions::mixtral(7, 3),
                          .dtype = std::get<1>(GetParam()),
                          .shared_intermediate = 64,
                          .keep = sequence.keep};
  const LayerProblem problem(options);
  const Piece everything{0, problem.num_tokens};
  Batches batches{input_of(problem, everything), input_of(problem, everything)};
  std::swap(batches[1].x, batches[1].d_y);
  batches[1].ids = Random(29).expert_ids(
      {.num_tokens = problem.num_tokens, .top_k = 3, .num_experts = 7, .none = 0.2});
  const auto alone = connect();
  const Results expected =
      Passes(*alone, Device::cuda(cuda_options()), options, sequence, batches)();
  for (const Sizing& sizing : {Sizing::bounded(3 * problem.num_tokens), Sizing::exact()}) {
    SCOPED_TRACE(sizing.is_bounded() ? "bounded" : "exact");
    options.sizing = sizing;
    on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
      const auto seed = static_cast<std::uint64_t>(comm.rank());
      const Device delaying(std::make_shared<DelayingDevice>(device, seed));
      const Piece piece = awkward_piece(comm, problem.num_tokens);
      Passes passes(comm, delaying, options, sequence, batches);
      for (int repetition = 0; repetition < 10; ++repetition) {
        const Results results = passes();
        for (std::size_t i = 0; i < 2; ++i) {
          EXPECT_TRUE(sequence.trains() ? same_part(results[i], piece, expected[i])
                                        : same_bits(results[i].y, piece.of(expected[i].y)))
              << "rank " << comm.rank() << ", repetition " << repetition << ", batch " << i;
        }
      }
      all_done(comm, device);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    CudaRanks, CudaRanksOrder,
    ::testing::Combine(::testing::Values(Sequence{"two_layers", "FfbB"},
                                         Sequence{"one_layer", "FfBb", {0, 0}},
                                         Sequence{"inference", "IiIi"},
                                         Sequence{"recomputed", "FfbB", {0, 1}, Keep::nothing}),
                       ::testing::Values(Dtype::f32, Dtype::bf16)),
    [](const auto& param) {
      return std::get<0>(param.param).name + "_" + std::string(name_of(std::get<1>(param.param)));
    });

}  // namespace
}  // namespace switchyard::testing::cuda_ranks_order_test
