// SPDX-License-Identifier: Apache-2.0
// Views of the experts in packed tensors.
#include "core/given.h"
#include "core/require.h"
#include "switchyard/experts.h"

namespace switchyard {
namespace {

template <typename View>
View matrix_of(const View& packed, std::int64_t expert, std::int64_t first, std::int64_t rows) {
  const auto columns = packed.shape()[2];
  return {packed.row(expert) + first * columns * size_of(packed.dtype()),
          packed.dtype(),
          {rows, columns},
          columns,
          packed.owner(),
          packed.memory()};
}

template <typename View>
View vector_of(const View& packed, std::int64_t expert, std::int64_t first, std::int64_t size) {
  return {packed.row(expert) + first * size_of(packed.dtype()),
          packed.dtype(),
          {size},
          1,
          packed.owner(),
          packed.memory()};
}

template <typename View>
std::vector<BasicExpertTensors<View>> unpack_views(const BasicPackedExperts<View>& packed,
                                                   Activation activation) {
  const auto& up = packed.gate_up.shape();
  const auto& down = packed.down.shape();
  const int parts = has_gate(activation) ? 2 : 1;
  require(up.rank() == 3 && down.rank() == 3 && up[0] == down[0] && up[1] == parts * down[2] &&
              up[2] == down[1],
          "gate_up {} and down {} do not belong together: they are [e, {}, H] and [e, H, I]", up,
          down, parts == 2 ? "2I" : "I");
  const auto intermediate = down[2];
  const Shape up_bias{up[0], up[1]};
  const Shape down_bias{down[0], down[1]};
  require(!is_given(packed.gate_up_bias) || packed.gate_up_bias.shape() == up_bias,
          "gate_up_bias is {}, but must be {}", packed.gate_up_bias.shape(), up_bias);
  require(!is_given(packed.down_bias) || packed.down_bias.shape() == down_bias,
          "down_bias is {}, but must be {}", packed.down_bias.shape(), down_bias);
  std::vector<BasicExpertTensors<View>> experts;
  for (std::int64_t e = 0; e < up[0]; ++e) {
    BasicExpertTensors<View> expert;
    const auto up_row = parts == 2 ? intermediate : 0;
    if (parts == 2) expert.gate = matrix_of(packed.gate_up, e, 0, intermediate);
    expert.up = matrix_of(packed.gate_up, e, up_row, intermediate);
    expert.down = matrix_of(packed.down, e, 0, down[1]);
    if (is_given(packed.gate_up_bias)) {
      if (parts == 2) expert.gate_bias = vector_of(packed.gate_up_bias, e, 0, intermediate);
      expert.up_bias = vector_of(packed.gate_up_bias, e, up_row, intermediate);
    }
    if (is_given(packed.down_bias)) expert.down_bias = vector_of(packed.down_bias, e, 0, down[1]);
    experts.push_back(expert);
  }
  return experts;
}

}  // namespace

std::vector<ExpertWeights> unpack(const PackedExperts& packed, Activation activation) {
  return unpack_views(packed, activation);
}
std::vector<ExpertViews> unpack(const PackedExpertViews& packed, Activation activation) {
  return unpack_views(packed, activation);
}

}  // namespace switchyard
