// SPDX-License-Identifier: Apache-2.0
#include "switchyard/convert.h"

#include <algorithm>
#include <vector>

#include "checkpoint/block_tensors.h"
#include "checkpoint/convert_elements.h"
#include "core/check_memory.h"
#include "core/given.h"
#include "core/require.h"
#include "moe/expert_tensors.h"

namespace switchyard {
namespace {

// Columns first, first + step, … of a matrix.
struct Columns {
  std::int64_t first = 0;
  std::int64_t step = 1;
};

template <typename T>
void transpose(const ConstTensorView& matrix, const Columns& columns, const TensorView& out) {
  constexpr std::int64_t kTile = 32;  // both sides of a tile stay in the cache
  const auto rows = out.shape()[0];
  const auto width = out.shape()[1];
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (std::int64_t c = 0; c < width; ++c) {
      const auto* from = reinterpret_cast<const T*>(matrix.row(c)) + columns.first;
      for (std::int64_t r = r0; r < std::min(r0 + kTile, rows); ++r) {
        reinterpret_cast<T*>(out.row(r))[c] = from[r * columns.step];
      }
    }
  }
}

// Copies these columns of [n, m] into rows: [m / step, n].
ConstTensorView transposed(const Device& device, const ConstTensorView& matrix,
                           const Columns& columns = {}) {
  require_on_device(matrix, device.memory(), "a tensor to be transposed");
  if (device.memory() != Memory::host) {
    const Tensor staged = device.to_host(matrix);
    return device.copy_of(transposed(Device(), staged, columns)).view();
  }
  Tensor out({matrix.shape()[1] / columns.step, matrix.shape()[0]}, matrix.dtype());
  if (matrix.dtype() == Dtype::f32) {
    transpose<float>(matrix, columns, out);
  } else {
    transpose<std::uint16_t>(matrix, columns, out);
  }
  return out.view();
}

// Copies these elements of a vector.
ConstTensorView picked(const Device& device, const ConstTensorView& vector,
                       const Columns& columns) {
  const auto size = vector.rows();
  const ConstTensorView row(vector.data(), vector.dtype(), {1, size}, size, vector.owner(),
                            vector.memory());
  const auto column = transposed(device, row, columns);
  return {column.data(), column.dtype(), {column.rows()}, 1, column.owner(), column.memory()};
}

// Converts f16, which layers do not compute in, to f32. Returns other tensors unchanged.
ConstTensorView widened(const Device& device, const ConstTensorView& view) {
  if (!is_given(view) || view.dtype() != Dtype::f16) return view;
  if (view.memory() != Memory::host) {
    require_on_device(view, device.memory(), "a tensor of f16");
    const Tensor staged = device.to_host(view);
    return device.copy_of(widened(Device(), staged)).view();
  }
  Tensor wide(view.shape(), Dtype::f32);
  convert(view, wide);
  return wide.view();
}

MoeWeights widened(const Device& device, MoeWeights weights) {
  const auto widen_expert = [&](ExpertWeights& expert) {
    for (ConstTensorView* view : tensors_in(expert)) *view = widened(device, *view);
  };
  RouterWeights& router = weights.router;
  for (ConstTensorView* view : {&router.gate, &router.gate_bias, &router.score_bias}) {
    *view = widened(device, *view);
  }
  std::ranges::for_each(weights.experts, widen_expert);
  widen_expert(weights.shared);
  return weights;
}

class NamedSource : public TensorSource {
 public:
  explicit NamedSource(const NamedTensors& tensors) : tensors_(tensors) {}

  bool has(const std::string& name) const override {
    return tensors_.contains(name) || tensors_.unreadable.contains(name);
  }
  ConstTensorView at(const std::string& name) const override {
    const auto reason = tensors_.unreadable.find(name);
    if (reason != tensors_.unreadable.end()) throw Unsupported(reason->second);
    return tensors_.at(name);
  }
  std::string first_under(const std::string& prefix) const override {
    const auto name = first_in(tensors_, prefix);
    return name.empty() ? first_in(tensors_.unreadable, prefix) : name;
  }

 private:
  template <typename Map>
  static std::string first_in(const Map& map, const std::string& prefix) {
    const auto found = map.lower_bound(prefix);
    return found != map.end() && found->first.starts_with(prefix) ? found->first : "";
  }

  const NamedTensors& tensors_;
};

constexpr std::string_view kPackedGateUp = "experts.gate_up_proj";
constexpr std::string_view kPackedUp = "experts.up_proj";
constexpr std::string_view kPackedDown = "experts.down_proj";

constexpr Columns kGates{.first = 0, .step = 2};
constexpr Columns kUps{.first = 1, .step = 2};

// Checkpoints use either name. Returns an empty expert if neither occurs.
ExpertWeights shared_expert(const BlockTensors& block, std::int64_t hidden) {
  constexpr std::string_view kOne = "shared_expert.";
  constexpr std::string_view kSeveral = "shared_experts.";
  const auto one = block.first_under(kOne);
  const auto several = block.first_under(kSeveral);
  require(one.empty() || several.empty(), "there are {} and {}: which is the shared expert?", one,
          several);
  const auto& first = one.empty() ? several : one;
  if (first.empty()) return {};
  const std::string stem(one.empty() ? kSeveral : kOne);
  require(block.has(fmt::format("{}{}.weight", stem, kProjections.up)),
          "there is {}, but no {}.weight beside it", first, kProjections.up);
  return block.expert(stem, kProjections, hidden);
}

MoeWeights from_gpt_oss(const BlockTensors& block, const Device& device) {
  MoeWeights result{.router = {.gate = block.router("router.weight"),
                               .gate_bias = block.get("router.bias", {block.num_experts()})}};
  const auto hidden = result.router.gate.shape()[1];
  const auto intermediate = block.extent("experts.gate_up_proj", 3, 2) / 2;
  const auto gate_up = block.slices("experts.gate_up_proj", {hidden, 2 * intermediate});
  const auto gate_up_bias = block.slices("experts.gate_up_proj_bias", {2 * intermediate});
  const auto down = block.slices("experts.down_proj", {intermediate, hidden});
  const auto down_bias = block.slices("experts.down_proj_bias", {hidden});
  result.shared = shared_expert(block, hidden);
  for (std::size_t i = 0; i < block.ids().size(); ++i) {
    result.experts.push_back({.gate = transposed(device, gate_up[i], kGates),
                              .up = transposed(device, gate_up[i], kUps),
                              .down = transposed(device, down[i]),
                              .gate_bias = picked(device, gate_up_bias[i], kGates),
                              .up_bias = picked(device, gate_up_bias[i], kUps),
                              .down_bias = down_bias[i]});
  }
  return result;
}

// Returns the rank's slices of a tensor, or as many empty views if there is no such tensor.
std::vector<ConstTensorView> slices_if_there(const BlockTensors& block, std::string_view name,
                                             const Shape& shape) {
  if (!block.has(name)) return std::vector<ConstTensorView>(block.ids().size());
  return block.slices(name, shape);
}

ConstTensorView part_of(const ConstTensorView& view, std::int64_t begin, std::int64_t end) {
  return is_given(view) ? view.slice(begin, end) : ConstTensorView{};
}

// Stored (out, in): gates first, then ups, or ups alone.
std::vector<ExpertWeights> packed_experts(const BlockTensors& block, std::string_view name,
                                          std::int64_t hidden) {
  const bool gated = name == kPackedGateUp;
  const auto width = block.extent(name, 3, 1);
  const auto intermediate = gated ? width / 2 : width;
  const auto first_up = gated ? intermediate : 0;
  const auto bias_name = fmt::format("{}_bias", name);
  const auto gate_up = block.slices(name, {first_up + intermediate, hidden});
  const auto down = block.slices(kPackedDown, {hidden, intermediate});
  const auto bias = slices_if_there(block, bias_name, {first_up + intermediate});
  const auto down_bias = slices_if_there(block, fmt::format("{}_bias", kPackedDown), {hidden});
  std::vector<ExpertWeights> experts;
  for (std::size_t i = 0; i < gate_up.size(); ++i) {
    ExpertWeights expert{.up = gate_up[i].slice(first_up, first_up + intermediate),
                         .down = down[i],
                         .up_bias = part_of(bias[i], first_up, first_up + intermediate),
                         .down_bias = down_bias[i]};
    if (gated) {
      expert.gate = gate_up[i].slice(0, intermediate);
      expert.gate_bias = part_of(bias[i], 0, intermediate);
    }
    experts.push_back(expert);
  }
  return experts;
}

std::vector<ExpertWeights> hugging_face_experts(const BlockTensors& block, std::int64_t hidden) {
  for (const auto name : {kPackedGateUp, kPackedUp}) {
    if (block.has(name)) return packed_experts(block, name, hidden);
  }
  if (block.ids().empty()) return {};
  const auto stem = fmt::format("experts.{}.", block.ids().front());
  const auto projection = fmt::format("{}{}.weight", stem, kProjections.up);
  const auto mixtral = fmt::format("{}{}.weight", stem, kMixtral.up);
  const auto found = block.first_of({kPackedGateUp, kPackedUp, projection, mixtral});
  return block.separate_experts(found == projection ? kProjections : kMixtral, hidden);
}

// Stored (in, out).
std::vector<ExpertWeights> transposed_experts(const BlockTensors& block, std::int64_t hidden,
                                              const Device& device) {
  const auto intermediate = block.extent("up_w", 3, 2);
  const auto up = block.slices("up_w", {hidden, intermediate});
  const auto down = block.slices("down_w", {intermediate, hidden});
  const bool gated = block.has("gate_w");
  const auto gate = gated ? block.slices("gate_w", {hidden, intermediate})
                          : std::vector<ConstTensorView>(up.size());
  std::vector<ExpertWeights> experts;
  for (std::size_t i = 0; i < up.size(); ++i) {
    experts.push_back({.gate = gated ? transposed(device, gate[i]) : ConstTensorView{},
                       .up = transposed(device, up[i]),
                       .down = transposed(device, down[i])});
  }
  return experts;
}

std::vector<ExpertWeights> kempner_forge_experts(const BlockTensors& block, std::int64_t hidden,
                                                 const Device& device) {
  if (block.has("up_w")) return transposed_experts(block, hidden, device);
  if (block.ids().empty()) return {};
  block.first_of(
      {"up_w", fmt::format("experts.{}.{}.weight", block.ids().front(), kProjections.up)});
  return block.separate_experts(kProjections, hidden);
}

}  // namespace

MoeWeights from_hugging_face(const NamedTensors& tensors, std::string_view prefix,
                             const ExpertPlacement& placement, int rank, const Device& device) {
  return widened(device,
                 from_hugging_face_source(NamedSource(tensors), prefix, placement, rank, device));
}

MoeWeights from_hugging_face_source(const TensorSource& tensors, std::string_view prefix,
                                    const ExpertPlacement& placement, int rank,
                                    const Device& device) {
  const BlockTensors block(tensors, prefix, placement, rank);
  const auto router = block.first_of({"gate.weight", "router.weight"});
  const auto gate = block.first_under("shared_expert_gate.");
  require<Unsupported>(gate.empty(),
                       "{}: a shared expert with a gate of its own (Qwen2-MoE) is not supported",
                       gate);
  if (router == "router.weight") return from_gpt_oss(block, device);
  MoeWeights result;
  result.router.gate = block.router("gate.weight");
  result.router.gate_bias = block.get_if_there("gate.bias", {block.num_experts()});
  result.router.score_bias =
      block.get_if_there("gate.e_score_correction_bias", {block.num_experts()});
  const auto hidden = result.router.gate.shape()[1];
  result.experts = hugging_face_experts(block, hidden);
  result.shared = shared_expert(block, hidden);
  return result;
}

MoeWeights from_kempner_forge(const NamedTensors& tensors, std::string_view prefix,
                              const ExpertPlacement& placement, int rank, const Device& device) {
  const NamedSource source(tensors);
  const BlockTensors block(source, prefix, placement, rank);
  MoeWeights result;
  result.router.gate = block.router("router.gate.weight");
  result.router.score_bias = block.get_if_there("router.expert_bias", {block.num_experts()});
  const auto hidden = result.router.gate.shape()[1];
  result.experts = kempner_forge_experts(block, hidden, device);
  result.shared = shared_expert(block, hidden);
  return widened(device, std::move(result));
}

}  // namespace switchyard
