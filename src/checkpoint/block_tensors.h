// SPDX-License-Identifier: Apache-2.0
// Finds the tensors of one MoE block in a checkpoint by name, and checks them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/convert.h"

namespace switchyard {

// The names of an expert's matrices and their biases, without the suffixes ".weight" and ".bias".
struct MatrixNames {
  std::string_view gate;
  std::string_view up;
  std::string_view down;
};
constexpr MatrixNames kProjections{"gate_proj", "up_proj", "down_proj"};
constexpr MatrixNames kMixtral{"w1", "w3", "w2"};

// Named tensors that are read only on request.
class TensorSource {
 public:
  TensorSource() = default;
  virtual ~TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  virtual bool has(const std::string& name) const = 0;
  // Requires has(name).
  virtual ConstTensorView at(const std::string& name) const = 0;
  // Returns the first name that begins with `prefix`, or "".
  virtual std::string first_under(const std::string& prefix) const = 0;
};

// Implements from_hugging_face for a TensorSource, but keeps f16 tensors as f16.
MoeWeights from_hugging_face_source(const TensorSource& tensors, std::string_view prefix,
                                    const ExpertPlacement& placement, int rank,
                                    const Device& device);

// The tensors under a prefix as one rank sees them. Names omit the prefix. Holds references to the
// tensors and the placement.
class BlockTensors {
 public:
  BlockTensors(const TensorSource& tensors, std::string_view prefix,
               const ExpertPlacement& placement, int rank);

  std::int64_t num_experts() const { return num_experts_; }
  // The ids of this rank's experts.
  std::span<const std::int32_t> ids() const { return ids_; }

  bool has(std::string_view name) const { return tensors_.has(full(name)); }
  // Returns the first full name that begins with the block's prefix and `stem`, or "".
  std::string first_under(std::string_view stem) const { return tensors_.first_under(full(stem)); }
  // Returns the first of these names that exists. Throws InvalidArgument if none does.
  std::string_view first_of(std::initializer_list<std::string_view> names) const;
  // Returns one extent of a tensor. Throws if it does not have `num_extents` of them.
  std::int64_t extent(std::string_view name, int num_extents, int dim) const;

  ConstTensorView get(std::string_view name, const Shape& shape) const;
  ConstTensorView get_if_there(std::string_view name, const Shape& shape) const {
    return has(name) ? get(name, shape) : ConstTensorView{};
  }
  // Returns the gate, [E, H]. H is taken from the tensor itself.
  ConstTensorView router(std::string_view name) const {
    return get(name, {num_experts_, extent(name, 2, 1)});
  }
  // Returns the rank's matrices or vectors from a tensor [e, …shape] that holds all experts or only
  // the rank's own.
  std::vector<ConstTensorView> slices(std::string_view name, const Shape& shape) const;

  // Returns the matrices, (out, in), and biases whose names begin with `stem`. The gate and the
  // biases are optional.
  ExpertWeights expert(const std::string& stem, const MatrixNames& names,
                       std::int64_t hidden) const;
  // Returns the rank's experts, stored as separate tensors per expert. Either all of them have a
  // gate or none has.
  std::vector<ExpertWeights> separate_experts(const MatrixNames& names, std::int64_t hidden) const;

 private:
  std::string full(std::string_view name) const { return prefix_ + std::string(name); }
  ConstTensorView at(std::string_view name) const { return tensors_.at(full(first_of({name}))); }

  const TensorSource& tensors_;
  std::string prefix_;
  std::int64_t num_experts_;
  std::span<const std::int32_t> ids_;
};

}  // namespace switchyard
