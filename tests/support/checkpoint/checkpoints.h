// SPDX-License-Identifier: Apache-2.0
// In-memory checkpoints under the prefix "mlp.", for tests of conversions.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "switchyard/convert.h"

namespace switchyard::testing {

constexpr std::int64_t kHidden = 37;  // both exceed a tile of the transposition
constexpr std::int64_t kInner = 41;

// Uneven and not consecutive; rank 1 owns no experts.
inline const ExpertPlacement& placement() {
  static const auto kPlacement = ExpertPlacement::from_lists(5, {{0, 3}, {}, {1, 2, 4}});
  return kPlacement;
}

// Tensors whose elements are all different numbers, as far as bf16 can represent them.
class Checkpoint {
 public:
  Checkpoint() = default;
  explicit Checkpoint(Dtype dtype) : dtype_(dtype) {}

  Checkpoint& add(const std::string& name, const Shape& shape) {
    Tensor tensor(shape, dtype_);
    for (std::int64_t i = 0; i < shape.num_elements(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      ++last_;
      if (dtype_ == Dtype::f32) {
        tensor.span<float>()[at] = static_cast<float>(last_);
      } else {
        tensor.span<Bfloat16>()[at] = {static_cast<std::uint16_t>(last_ % 0x7f80)};  // all finite
      }
    }
    tensors_["mlp." + name] = tensor.view();
    return *this;
  }
  Checkpoint& remove(const std::string& name) {
    tensors_.erase("mlp." + name);
    return *this;
  }

  const NamedTensors& tensors() const { return tensors_; }
  const ConstTensorView& at(const std::string& name) const { return tensors_.at("mlp." + name); }

 private:
  Dtype dtype_ = Dtype::f32;
  int last_ = 0;
  NamedTensors tensors_;
};

inline MoeWeights hugging_face(const Checkpoint& checkpoint, int rank) {
  return from_hugging_face(checkpoint.tensors(), "mlp.", placement(), rank);
}
inline MoeWeights kempner_forge(const Checkpoint& checkpoint, int rank) {
  return from_kempner_forge(checkpoint.tensors(), "mlp.", placement(), rank);
}

inline Checkpoint packed_hugging_face(std::int64_t num_packed) {
  Checkpoint result;
  result.add("gate.weight", {5, kHidden})
      .add("experts.gate_up_proj", {num_packed, 2 * kInner, kHidden})
      .add("experts.down_proj", {num_packed, kHidden, kInner});
  return result;
}

inline const std::array<std::string, 3> kProjectionNames{"gate_proj.weight", "up_proj.weight",
                                                         "down_proj.weight"};
inline const std::array<std::string, 3> kMixtralNames{"w1.weight", "w3.weight", "w2.weight"};

// Holds only the experts of rank 0, since a rank needs no others.
inline Checkpoint separate(const std::string& router, const std::array<std::string, 3>& names) {
  Checkpoint result;
  result.add(router, {5, kHidden});
  for (const std::string stem : {"experts.0.", "experts.3."}) {
    result.add(stem + names[0], {kInner, kHidden})
        .add(stem + names[1], {kInner, kHidden})
        .add(stem + names[2], {kHidden, kInner});
  }
  return result;
}

inline Checkpoint gpt_oss(Dtype dtype) {
  Checkpoint result(dtype);
  result.add("router.weight", {5, kHidden})
      .add("router.bias", {5})
      .add("experts.gate_up_proj", {5, kHidden, 2 * kInner})
      .add("experts.gate_up_proj_bias", {5, 2 * kInner})
      .add("experts.down_proj", {5, kInner, kHidden})
      .add("experts.down_proj_bias", {5, kHidden});
  return result;
}

}  // namespace switchyard::testing
