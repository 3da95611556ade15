// SPDX-License-Identifier: Apache-2.0
// Experts as packed tensors: the form that all experts of a layer share, and their rows wherever
// they are stored.
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

// The tensors that an expert has, their sizes and dtypes. A gate has the shape and dtype of up.
struct ExpertForm {
  static constexpr std::size_t kNumFields = 7;

  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool gated = false;
  Dtype up = Dtype::f32;
  Dtype down = Dtype::f32;
  std::optional<Dtype> up_bias = {};
  std::optional<Dtype> down_bias = {};

  // Converts the form to and from fields that ranks exchange.
  std::array<Field, kNumFields> fields() const;
  static ExpertForm from_fields(std::span<const std::int64_t> values);
};

// Returns the form that the experts share. Throws InvalidArgument if one of them is incomplete or
// differs from the first.
ExpertForm form_of(std::span<const ExpertWeights> experts);

// A tensor [e, …] that is stored in pieces.
struct ExpertRows {
  Shape shape;
  Dtype dtype = Dtype::f32;
  std::vector<std::vector<ConstTensorView>> pieces = {};  // [e]: the pieces of each row, in order
};

// Returns the packed tensors of experts of this form: gate_up, down, and the biases that the form
// has. `experts` may be empty.
std::vector<ExpertRows> packed_rows(const ExpertForm& form, std::span<const ExpertWeights> experts);
// Returns views of the experts in such packed tensors.
std::vector<ExpertViews> unpack(const ExpertForm& form, std::span<Tensor> packed);

// Returns a contiguous copy of the rows in the given order. Both are in the device's memory.
Tensor pack(const ExpertRows& rows, std::span<const std::size_t> order, const Device& device);

}  // namespace switchyard
