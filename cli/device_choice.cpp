#include "device_choice.h"

#include "add_choice.h"

namespace switchyard::cli {

void add_device_options(CLI::App* command, DeviceChoice& choice, const std::string& device_help) {
  add_choice(
      command, "--device", choice.kind, device_help,
      std::map<std::string, DeviceKind>{{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}});
  add_choice(command, "--kernels", choice.kernels,
             "With --device cuda: those of the GPU's own kind where there are any, or those that "
             "every GPU runs, to check them by [best]",
             std::map<std::string, CudaKernels>{{"best", CudaKernels::best},
                                                {"portable", CudaKernels::portable}});
}

void require_sound(const DeviceChoice& choice) {
  if (choice.kernels && choice.kind != DeviceKind::cuda) {
    throw CLI::ValidationError("--kernels", "only a GPU has a choice: add --device cuda");
  }
}

namespace {

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
