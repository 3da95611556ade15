// Which device a command computes on, and how its tensors come there.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "switchyard/device.h"
#include "switchyard/moe_parameters.h"

namespace switchyard::cli {

enum class DeviceKind { cpu, cuda };

struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;
  std::optional<CudaKernels> kernels = {};  // only of a GPU

  CudaOptions cuda() const { return {.kernels = kernels.value_or(CudaKernels::best)}; }
  Device make() const { return kind == DeviceKind::cuda ? Device::cuda(cuda()) : Device(); }
};

// --device, with this help, and --kernels. `choice` must outlive the command.
void add_device_options(CLI::App* command, DeviceChoice& choice, const std::string& device_help);
// Throws CLI::ValidationError where --kernels was given for a CPU.
void require_sound(const DeviceChoice& choice);

// Weights in the device's memory: where they lie, if they are there already.
MoeWeights on_device(const Device& device, const MoeWeights& weights);

}  // namespace switchyard::cli
