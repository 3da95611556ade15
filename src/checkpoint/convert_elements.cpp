// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert_elements.h"

#include <type_traits>

namespace switchyard {
namespace {

template <typename From, typename Into>
void convert_rows(const ConstTensorView& from, const TensorView& into) {
  const auto row_elements = from.shape().row_elements();
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    const auto* source = reinterpret_cast<const From*>(from.row(r));
    auto* target = reinterpret_cast<Into*>(into.row(r));
    for (std::int64_t i = 0; i < row_elements; ++i) {
      if constexpr (std::is_same_v<Into, float>) {
        target[i] = to_float(source[i]);
      } else {
        target[i] = to_bfloat16(to_float(source[i]));
      }
    }
  }
}

}  // namespace

bool can_become(Dtype from, Dtype into) {
  if (from == into) return true;
  if (into == Dtype::f32) return from == Dtype::bf16 || from == Dtype::f16;
  return into == Dtype::bf16 && from == Dtype::f16;
}

void convert(const ConstTensorView& from, const TensorView& into) {
  if (from.dtype() == Dtype::bf16) return convert_rows<Bfloat16, float>(from, into);
  if (into.dtype() == Dtype::f32) return convert_rows<Float16, float>(from, into);
  convert_rows<Float16, Bfloat16>(from, into);
}

}  // namespace switchyard
