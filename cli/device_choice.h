// SPDX-License-Identifier: Apache-2.0
// Chooses the device that a command computes on, and moves its tensors there.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>

#include "launch.h"
#include "switchyard/device.h"
#include "switchyard/moe_parameters.h"

namespace switchyard::cli {

enum class DeviceKind { cpu, cuda };

struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;
  std::optional<CudaKernels> kernels = {};  // only for GPUs
  int num_gpus = 1;                         // number of GPUs that ranks are spread over

  // Rank r uses GPU r % num_gpus.
  CudaOptions cuda(int rank = 0) const {
    return {.ordinal = rank % num_gpus, .kernels = kernels.value_or(CudaKernels::best)};
  }
  Device make(int rank = 0) const {
    return kind == DeviceKind::cuda ? Device::cuda(cuda(rank)) : Device();
  }
};

// Adds --device, with the given help, and --kernels. `choice` must outlive the command.
void add_device_options(CLI::App* command, DeviceChoice& choice, const std::string& device_help);
// Throws CLI::ValidationError if --kernels was given for a CPU, or if GPUs cannot run that many
// ranks.
void require_sound(const DeviceChoice& choice, const LaunchOptions& ranks);
// With --device cuda, sets environment variables that CUDA reads. Call it before anything uses
// CUDA.
void prepare_environment(const DeviceChoice& choice, const LaunchOptions& ranks);
// Launches the ranks; with --device cuda and threads, one unless more were asked for. Passes `body`
// the choice with num_gpus set. Throws if there is no GPU: once for threads, otherwise on each
// rank.
void launch_on(const DeviceChoice& choice, LaunchOptions options,
               const std::function<void(Communicator&, const DeviceChoice&)>& body);

// Returns the weights in the device's memory, without a copy if the device uses host memory.
MoeWeights on_device(const Device& device, const MoeWeights& weights);

}  // namespace switchyard::cli
