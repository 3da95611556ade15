#include "device_choice.h"

namespace switchyard::cli {
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
