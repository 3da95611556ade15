// SPDX-License-Identifier: Apache-2.0
// Inputs of plans, for their tests.
#pragma once

#include <initializer_list>

#include "switchyard/plan.h"

namespace switchyard::testing {

inline PlanOptions options_with(Sizing sizing = Sizing::exact(), std::int64_t alignment = 1) {
  return {.hidden = 4, .alignment = alignment, .sizing = sizing};
}

inline Tensor ids_of(const Shape& shape, std::initializer_list<std::int32_t> ids) {
  return Tensor::from<std::int32_t>(shape, ids);
}

}  // namespace switchyard::testing
