// Which device a command computes on, and how its tensors come there.
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
  std::optional<CudaKernels> kernels = {};  // only of a GPU
  int num_gpus = 1;                         // that ranks are spread over

  // Rank r is on GPU r modulo their number.
  CudaOptions cuda(int rank = 0) const {
    return {.ordinal = rank % num_gpus, .kernels = kernels.value_or(CudaKernels::best)};
  }
  Device make(int rank = 0) const {
    return kind == DeviceKind::cuda ? Device::cuda(cuda(rank)) : Device();
  }
};

// --device, with this help, and --kernels. `choice` must outlive the command.
void add_device_options(CLI::App* command, DeviceChoice& choice, const std::string& device_help);
// Throws CLI::ValidationError where --kernels was given for a CPU, and where a GPU cannot have such
// ranks.
void require_sound(const DeviceChoice& choice, const LaunchOptions& ranks);
// With --device cuda, before anything uses CUDA: sets what it reads from the environment.
void prepare_environment(const DeviceChoice& choice, const LaunchOptions& ranks);
// Launches ranks, one on a GPU unless more were asked for, with the choice of the device that tells
// how many GPUs they are spread over. Where there is none, threads say so once.
void launch_on(const DeviceChoice& choice, LaunchOptions options,
               const std::function<void(Communicator&, const DeviceChoice&)>& body);

// Weights in the device's memory: where they lie, if they are there already.
MoeWeights on_device(const Device& device, const MoeWeights& weights);

}  // namespace switchyard::cli
