// SPDX-License-Identifier: Apache-2.0
#include "support/device/token_reading_device.h"

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "support/compare.h"
#include "support/device/forwarding_device.h"

namespace switchyard::testing {
namespace {

// The rows of the groups, and the assignment of each.
class MadeRows {
 public:
  MadeRows(const TokenRows& tokens, const ConstTensorView& row_offsets,
           const ConstTensorView& group_rows)
      : tokens_(tokens) {
    const auto sources = tokens.row_sources.span<std::int32_t>();
    const auto offsets = row_offsets.span<std::int32_t>();
    const auto counts = group_rows.span<std::int32_t>();
    for (std::size_t e = 0; e < counts.size(); ++e) {
      for (std::int64_t r = offsets[e]; r < offsets[e] + counts[e]; ++r) {
        pairs_.push_back({r, sources[static_cast<std::size_t>(r)]});
      }
    }
  }

  // Expands [T, H] to [R, H].
  Tensor rows_of(const ConstTensorView& of_tokens) const {
    Tensor rows = poisoned({num_rows(), of_tokens.shape()[1]}, of_tokens.dtype());
    for (const auto& [row, assignment] : pairs_) {
      std::memcpy(rows.view().row(row), of_tokens.row(assignment / tokens_.top_k),
                  static_cast<std::size_t>(of_tokens.row_bytes()));
    }
    return rows;
  }
  // Expands [T, K] to [R].
  std::optional<Tensor> numbers_of(const std::optional<ConstTensorView>& of_assignments) const {
    if (!of_assignments) return std::nullopt;
    Tensor numbers = poisoned({num_rows()}, Dtype::f32);
    for (const auto& [row, assignment] : pairs_) {
      numbers.span<float>()[index(row)] = of_assignments->span<float>()[index(assignment)];
    }
    return numbers;
  }
  void put_back(const Tensor& numbers, const TensorView& of_assignments) const {
    for (const auto& [row, assignment] : pairs_) {
      of_assignments.span<float>()[index(assignment)] = numbers.span<float>()[index(row)];
    }
  }
  std::int64_t num_rows() const { return tokens_.row_sources.rows(); }

 private:
  struct Pair {
    std::int64_t row;
    std::int64_t assignment;
  };
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  const TokenRows& tokens_;
  std::vector<Pair> pairs_;
};

std::optional<ConstTensorView> view_of(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<ConstTensorView>(tensor->view()) : std::nullopt;
}

class TokenReadingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  bool reads_tokens(const ExpertsOptions& options) const override {
    return options.weight_stage != WeightStage::input;
  }

  void experts_forward(const ExpertsForward& args) const override {
    if (!args.in.tokens) return base().experts_forward(args);
    const MadeRows made(*args.in.tokens, args.row_offsets, args.group_rows);
    const Tensor rows = made.rows_of(args.in.tokens->x);
    const auto row_weights = made.numbers_of(args.in.row_weights);
    const ExpertsInput in{.rows = rows, .row_weights = view_of(row_weights)};
    base().experts_forward({.options = args.options,
                            .weights = args.weights,
                            .row_offsets = args.row_offsets,
                            .group_rows = args.group_rows,
                            .in = in,
                            .out = args.out,
                            .times = args.times});
  }

  void experts_backward(const ExpertsBackward& args) const override {
    if (!args.in.tokens) return base().experts_backward(args);
    const MadeRows made(*args.in.tokens, args.row_offsets, args.group_rows);
    Tensor rows = made.rows_of(args.in.tokens->x);
    const Tensor d_out = made.rows_of(args.in.d_out);
    const auto row_weights = made.numbers_of(args.in.row_weights);
    const ExpertsBackwardInput in{.rows = rows,
                                  .row_weights = view_of(row_weights),
                                  .inner = args.in.inner,
                                  .inner_rows = args.in.inner_rows,
                                  .d_out = d_out};
    Tensor d_row_weights = poisoned({made.num_rows()}, Dtype::f32);
    ExpertsBackwardOutput out = args.out;
    if (out.d_row_weights) out.d_row_weights = d_row_weights;
    base().experts_backward({.options = args.options,
                             .weights = args.weights,
                             .row_offsets = args.row_offsets,
                             .group_rows = args.group_rows,
                             .in = in,
                             .out = out,
                             .times = args.times});
    if (args.out.d_row_weights) made.put_back(d_row_weights, *args.out.d_row_weights);
  }
};

}  // namespace

Device token_reading_device() {
  return Device(std::make_shared<const TokenReadingDevice>(Device()));
}

}  // namespace switchyard::testing
