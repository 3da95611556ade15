// Experts as packed tensors: what all of a layer's have in common, and their rows wherever they
// lie.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/agreement.h"
#include "switchyard/device.h"
#include "switchyard/experts.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Which tensors an expert has, of what size and dtype. Gates are as ups.
struct ExpertForm {
  static constexpr std::size_t kNumFields = 7;

  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool gated = false;
  Dtype up = Dtype::f32;
  Dtype down = Dtype::f32;
  std::optional<Dtype> up_bias = {};
  std::optional<Dtype> down_bias = {};

  // To be told to other ranks.
  std::array<Field, kNumFields> fields() const;
  static ExpertForm from_fields(std::span<const std::int64_t> values);
};

// Throws InvalidArgument if there is an expert that is not as the first, or not whole.
ExpertForm form_of(std::span<const ExpertWeights> experts);

// A tensor [e, …] that lies in pieces.
struct ExpertRows {
  Shape shape;
  Dtype dtype = Dtype::f32;
  std::vector<std::vector<ConstTensorView>> pieces = {};  // [e]: a row's, side by side
};

// The packed tensors of experts of this form, of which there may be none: gate_up, down, and those
// of the biases that it has.
std::vector<ExpertRows> packed_rows(const ExpertForm& form, std::span<const ExpertWeights> experts);
// The experts of such tensors.
std::vector<ExpertViews> unpack(const ExpertForm& form, std::span<Tensor> packed);

// A contiguous copy of these rows, in this order; both are in the device's memory.
Tensor pack(const ExpertRows& rows, std::span<const std::size_t> order, const Device& device);

}  // namespace switchyard
