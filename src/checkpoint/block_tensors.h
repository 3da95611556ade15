// The tensors of one MoE block in a checkpoint, found by name and checked.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/convert.h"

namespace switchyard {

// The names of an expert's matrices, with ".weight" behind them, and of their biases, with ".bias".
struct MatrixNames {
  std::string_view gate;
  std::string_view up;
  std::string_view down;
};
constexpr MatrixNames kProjections{"gate_proj", "up_proj", "down_proj"};
constexpr MatrixNames kMixtral{"w1", "w3", "w2"};

// Named tensors, of which only those that are asked for are read.
class TensorSource {
 public:
  TensorSource() = default;
  virtual ~TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  virtual bool has(const std::string& name) const = 0;
  // Of one that is there.
  virtual ConstTensorView at(const std::string& name) const = 0;
  // The first whose name begins with `prefix`, or "".
  virtual std::string first_under(const std::string& prefix) const = 0;
};

// from_hugging_face of such; f16 stays f16.
MoeWeights from_hugging_face_source(const TensorSource& tensors, std::string_view prefix,
                                    const ExpertPlacement& placement, int rank,
                                    const Device& device);

// The tensors under a prefix as one rank sees them; names are given without the prefix. Refers to
// the tensors and the placement.
class BlockTensors {
 public:
  BlockTensors(const TensorSource& tensors, std::string_view prefix,
               const ExpertPlacement& placement, int rank);

  std::int64_t num_experts() const { return num_experts_; }
  // The rank's experts.
  std::span<const std::int32_t> ids() const { return ids_; }

  bool has(std::string_view name) const { return tensors_.has(full(name)); }
  // The first whose name begins so, with the block's prefix; or "".
  std::string first_under(std::string_view stem) const { return tensors_.first_under(full(stem)); }
  // The first of these names that is there.
  std::string_view first_of(std::initializer_list<std::string_view> names) const;
  // One extent of a tensor that has so many.
  std::int64_t extent(std::string_view name, int num_extents, int dim) const;

  ConstTensorView get(std::string_view name, const Shape& shape) const;
  ConstTensorView get_if_there(std::string_view name, const Shape& shape) const {
    return has(name) ? get(name, shape) : ConstTensorView{};
  }
  // [E, H], which says what H is.
  ConstTensorView router(std::string_view name) const {
    return get(name, {num_experts_, extent(name, 2, 1)});
  }
  // The rank's matrices, or vectors, of a tensor [e, …shape] of all experts or the rank's own.
  std::vector<ConstTensorView> slices(std::string_view name, const Shape& shape) const;

  // The matrices, (out, in), and biases whose names begin with `stem`: with a gate and biases, or
  // without, as they are there.
  ExpertWeights expert(const std::string& stem, const MatrixNames& names,
                       std::int64_t hidden) const;
  // The rank's experts, each with tensors of its own; all have a gate, or none has.
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
