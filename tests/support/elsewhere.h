// SPDX-License-Identifier: Apache-2.0
// Views that claim to be in GPU memory, for functions that must reject them before they read.
#pragma once

#include "switchyard/tensor.h"

namespace switchyard::testing {

template <typename Byte>
BasicTensorView<Byte> elsewhere(const BasicTensorView<Byte>& view) {
  return {view.data(), view.dtype(), view.shape(), view.row_stride(), view.owner(), Memory::gpu};
}
inline TensorView elsewhere(Tensor& tensor) { return elsewhere(tensor.view()); }

// The error message about such a tensor, after its name.
inline constexpr const char* kGivenToTheCpu =
    " is in gpu memory, but the device works in host memory; pass the GPU's device as well";

}  // namespace switchyard::testing
