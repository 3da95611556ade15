// SPDX-License-Identifier: Apache-2.0
// Every kind of layer: pad rows, padding, capacity, scaled gradients, losses of sequences, dropped
// rows.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "device/cuda/layer_fixture.h"

namespace switchyard::testing {

// `rows` are the most that a rank can be sent.
struct Form {
  std::string name;
  void (*set)(MoeLayerOptions&, std::int64_t rows) = [](MoeLayerOptions&, std::int64_t) {};
  bool has_padding = false;
};
inline std::ostream& operator<<(std::ostream& out, const Form& form) { return out << form.name; }

inline MoeLayerOptions options_of(const Form& form, Dtype dtype, int num_ranks) {
  auto options = graph_options(dtype, rows_of(num_ranks));
  form.set(options, rows_of(num_ranks));
  return options;
}

namespace forms {

inline void align(MoeLayerOptions& options, std::int64_t rows, std::int64_t alignment) {
  options.alignment = alignment;
  options.sizing = Sizing::bounded((rows / alignment + 1 + kExperts) * alignment);
}
inline void align_16(MoeLayerOptions& options, std::int64_t rows) { align(options, rows, 16); }
inline void align_128(MoeLayerOptions& options, std::int64_t rows) { align(options, rows, 128); }
inline void limit(MoeLayerOptions& options, std::int64_t /*rows*/) {
  options.capacity = {.factor = 0.8};
}
inline void scale(MoeLayerOptions& options, std::int64_t /*rows*/) {
  options.gradient_scale = GradientScale::global;
}
inline void balance_sequences(MoeLayerOptions& options, std::int64_t /*rows*/) {
  options.losses.balance = BalanceLoss::sequence;
}
inline void drop(MoeLayerOptions& options, std::int64_t /*rows*/) {
  options.sizing = Sizing::bounded(96, Overflow::drop);
}
inline void all_at_once(MoeLayerOptions& options, std::int64_t rows) {
  align_16(options, rows);
  limit(options, rows);
  scale(options, rows);
  balance_sequences(options, rows);
  options.sizing = Sizing::bounded(128, Overflow::drop);
}

}  // namespace forms

inline std::vector<Form> all_forms() {
  return {{"pad_rows", forms::align_16},
          {"pad_rows_128", forms::align_128},
          {.name = "padding", .has_padding = true},
          {"capacity", forms::limit},
          {"scaled_gradients", forms::scale},
          {"sequences", forms::balance_sequences},
          {"dropped_rows", forms::drop},
          {"all_at_once", forms::all_at_once, true}};
}

// Captures, replays and compares all of it, on one rank of several or alone.
inline void expect_form_replays(const Form& form, const MoeLayerOptions& options,
                                const Device& device, Communicator& comm) {
  LayerFixture replayed(options, device, comm);
  LayerFixture eager(options, device, comm);
  if (form.has_padding) {
    replayed.pad_every_third_token();
    eager.pad_every_third_token();
  }
  expect_replays_equal_eager(replayed, eager, [&] {
    EXPECT_EQ(replayed.layer.stats().dropped_by_rank, eager.layer.stats().dropped_by_rank);
    EXPECT_EQ(replayed.layer.stats().over_capacity, eager.layer.stats().over_capacity);
  });
}

}  // namespace switchyard::testing
