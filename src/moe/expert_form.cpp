// SPDX-License-Identifier: Apache-2.0
#include "moe/expert_form.h"

#include <string_view>

#include "core/require.h"
#include "device/new_tensor.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

constexpr std::int64_t kNone = -1;  // stands for a missing dtype

std::int64_t number_of(std::optional<Dtype> dtype) {
  return dtype ? static_cast<std::int64_t>(*dtype) : kNone;
}

std::optional<Dtype> dtype_of(std::int64_t number) {
  return number == kNone ? std::nullopt : std::optional(static_cast<Dtype>(number));
}

std::optional<Dtype> dtype_if_given(const ConstTensorView& view) {
  return is_given(view) ? std::optional(view.dtype()) : std::nullopt;
}

void require_part(const ConstTensorView& view, const Shape& shape, std::optional<Dtype> dtype,
                  std::string_view name) {
  if (!dtype) return require(!is_given(view), "{} is given, but others of its kind are not", name);
  shape.rank() == 1 ? require_vector(view, shape[0], name) : require_matrix(view, shape, name);
  require(view.dtype() == *dtype, "{} is {}, but others of its kind are {}", name,
          name_of(view.dtype()), name_of(*dtype));
}

void require_form(const ExpertForm& form, const ExpertWeights& expert, std::size_t index) {
  const Shape inner{form.intermediate, form.hidden};
  const Shape outer{form.hidden, form.intermediate};
  const auto check = [&](const ConstTensorView& view, const Shape& shape,
                         std::optional<Dtype> dtype, std::string_view part) {
    require_part(view, shape, dtype, fmt::format("local expert {}'s {}", index, part));
  };
  const auto if_gated = [&](std::optional<Dtype> dtype) {
    return form.gated ? dtype : std::nullopt;
  };
  check(expert.up, inner, form.up, "up");
  check(expert.gate, inner, if_gated(form.up), "gate");
  check(expert.down, outer, form.down, "down");
  check(expert.up_bias, {form.intermediate}, form.up_bias, "up_bias");
  check(expert.gate_bias, {form.intermediate}, if_gated(form.up_bias), "gate_bias");
  check(expert.down_bias, {form.hidden}, form.down_bias, "down_bias");
}

}  // namespace

std::array<Field, ExpertForm::kNumFields> ExpertForm::fields() const {
  return {{{"hidden", hidden},
           {"intermediate", intermediate},
           {"whether experts have gates", gated ? 1 : 0},
           {"the dtype of gate and up", number_of(up)},
           {"the dtype of down", number_of(down)},
           {"the dtype of up_bias", number_of(up_bias)},
           {"the dtype of down_bias", number_of(down_bias)}}};
}

ExpertForm ExpertForm::from_fields(std::span<const std::int64_t> values) {
  return {.hidden = values[0],
          .intermediate = values[1],
          .gated = values[2] != 0,
          .up = static_cast<Dtype>(values[3]),
          .down = static_cast<Dtype>(values[4]),
          .up_bias = dtype_of(values[5]),
          .down_bias = dtype_of(values[6])};
}

ExpertForm form_of(std::span<const ExpertWeights> experts) {
  if (experts.empty()) return {};
  const ExpertWeights& first = experts.front();
  require(is_given(first.up) && first.up.shape().rank() == 2,
          "local expert 0's up is {}, but must be [I,H]", first.up.shape());
  const ExpertForm form{.hidden = first.up.shape()[1],
                        .intermediate = first.up.shape()[0],
                        .gated = is_given(first.gate),
                        .up = first.up.dtype(),
                        .down = first.down.dtype(),
                        .up_bias = dtype_if_given(first.up_bias),
                        .down_bias = dtype_if_given(first.down_bias)};
  for (std::size_t i = 0; i < experts.size(); ++i) require_form(form, experts[i], i);
  return form;
}

std::vector<ExpertRows> packed_rows(const ExpertForm& form,
                                    std::span<const ExpertWeights> experts) {
  const auto count = static_cast<std::int64_t>(experts.size());
  const auto width = (form.gated ? 2 : 1) * form.intermediate;
  std::vector<ExpertRows> result;
  const auto add = [&](const Shape& shape, Dtype dtype, ConstTensorView ExpertWeights::*gate,
                       ConstTensorView ExpertWeights::*part) {
    ExpertRows& rows = result.emplace_back(ExpertRows{.shape = shape, .dtype = dtype});
    for (const auto& expert : experts) {
      auto& pieces = rows.pieces.emplace_back();
      if (gate != nullptr && form.gated) pieces.push_back(expert.*gate);
      pieces.push_back(expert.*part);
    }
  };
  add({count, width, form.hidden}, form.up, &ExpertWeights::gate, &ExpertWeights::up);
  add({count, form.hidden, form.intermediate}, form.down, nullptr, &ExpertWeights::down);
  if (form.up_bias) {
    add({count, width}, *form.up_bias, &ExpertWeights::gate_bias, &ExpertWeights::up_bias);
  }
  if (form.down_bias) {
    add({count, form.hidden}, *form.down_bias, nullptr, &ExpertWeights::down_bias);
  }
  return result;
}

std::vector<ExpertViews> unpack(const ExpertForm& form, std::span<Tensor> packed) {
  auto next = packed.begin();
  PackedExpertViews tensors{.gate_up = *next++, .down = *next++};
  if (form.up_bias) tensors.gate_up_bias = *next++;
  if (form.down_bias) tensors.down_bias = *next++;
  return unpack(tensors, form.gated ? Activation::swiglu : Activation::relu);
}

Tensor pack(const ExpertRows& rows, std::span<const std::size_t> order, const Device& device) {
  Tensor result =
      new_tensor(device, rows.shape.with_rows(static_cast<std::int64_t>(order.size())), rows.dtype);
  std::byte* to = result.data();
  for (const auto row : order) {
    for (const auto& piece : rows.pieces[row]) {
      device.copy(piece, TensorView(to, piece.dtype(), piece.shape(), piece.shape().row_elements(),
                                    result.view().owner(), result.memory()));
      to += piece.bytes();
    }
  }
  return result;
}

}  // namespace switchyard
