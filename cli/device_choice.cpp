// SPDX-License-Identifier: Apache-2.0
#include "device_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "add_choice.h"
#include "switchyard/build_info.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

// The most hardware queues that CUDA opens to a GPU.
constexpr int kMostGpuRanks = 32;

}  // namespace

void add_device_options(CLI::App* command, DeviceChoice& choice, const std::string& device_help) {
  add_choice(
      command, "--device", choice.kind, device_help,
      std::map<std::string, DeviceKind>{{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}});
  add_choice(command, "--kernels", choice.kernels,
             "With --device cuda: the fastest kernels for this GPU, or portable ones that every "
             "GPU runs [best]",
             std::map<std::string, CudaKernels>{{"best", CudaKernels::best},
                                                {"portable", CudaKernels::portable}});
}

void require_sound(const DeviceChoice& choice, const LaunchOptions& ranks) {
  if (choice.kind != DeviceKind::cuda) {
    if (!choice.kernels) return;
    throw CLI::ValidationError("--kernels", "it works only on GPUs: add --device cuda");
  }
  if (ranks.comm == "threads" && ranks.ranks > kMostGpuRanks) {
    throw CLI::ValidationError("--ranks",
                               fmt::format("{} are too many: --device cuda allows at most {} "
                                           "threads; use processes (--comm mpi) for more",
                                           ranks.ranks, kMostGpuRanks));
  }
}

// A kernel that waits for another rank of this process must not block that rank's work. It would do
// so if both shared a queue to the GPU (CUDA has 8 by default), or if a kernel were loaded lazily
// at its first launch, which needs an idle GPU. Values that the user has set are kept. Processes
// need neither, and under MPS four of them could not have that many queues.
void prepare_environment(const DeviceChoice& choice, const LaunchOptions& ranks) {
  if (choice.kind != DeviceKind::cuda || ranks.comm != "threads") return;
  constexpr int kKeep = 0;
  ::setenv("CUDA_MODULE_LOADING", "EAGER", kKeep);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kMostGpuRanks).c_str(), kKeep);
}

namespace {

// Returns the choice with num_gpus set to the number of GPUs, at most one per rank. Throws, with
// the reason, if there is no GPU.
DeviceChoice spread_over_gpus(DeviceChoice choice, int num_ranks) {
  if (choice.kind != DeviceKind::cuda) return choice;
  const auto num_gpus = static_cast<int>(gpus().size());
  if (num_gpus == 0) choice.make();
  choice.num_gpus = std::clamp(num_gpus, 1, std::max(1, num_ranks));
  return choice;
}

ConstTensorView moved(const Device& device, const ConstTensorView& view) {
  if (view.data() == nullptr) return view;
  const Tensor copy = device.copy_of(view);
  return copy;
}

ExpertWeights moved(const Device& device, const ExpertWeights& e) {
  return {.gate = moved(device, e.gate),
          .up = moved(device, e.up),
          .down = moved(device, e.down),
          .gate_bias = moved(device, e.gate_bias),
          .up_bias = moved(device, e.up_bias),
          .down_bias = moved(device, e.down_bias)};
}

}  // namespace

void launch_on(const DeviceChoice& choice, LaunchOptions options,
               const std::function<void(Communicator&, const DeviceChoice&)>& body) {
  if (options.comm != "threads") {
    launch(options, [&](Communicator& comm) { body(comm, spread_over_gpus(choice, comm.size())); });
    return;
  }
  if (choice.kind == DeviceKind::cuda) options.ranks = std::max(1, options.ranks);
  const DeviceChoice spread = spread_over_gpus(choice, options.ranks);
  launch(options, [&](Communicator& comm) { body(comm, spread); });
}

MoeWeights on_device(const Device& device, const MoeWeights& weights) {
  if (device.memory() == Memory::host) return weights;
  MoeWeights result{.router = {.gate = moved(device, weights.router.gate),
                               .gate_bias = moved(device, weights.router.gate_bias),
                               .score_bias = moved(device, weights.router.score_bias)},
                    .shared = moved(device, weights.shared)};
  for (const auto& expert : weights.experts) result.experts.push_back(moved(device, expert));
  return result;
}

}  // namespace switchyard::cli
