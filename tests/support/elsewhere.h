// Views that say they are in the memory of a GPU, for what must refuse them before it looks.
#pragma once

#include "switchyard/tensor.h"

namespace switchyard::testing {

template <typename Byte>
BasicTensorView<Byte> elsewhere(const BasicTensorView<Byte>& view) {
  return {view.data(), view.dtype(), view.shape(), view.row_stride(), view.owner(), Memory::gpu};
}
inline TensorView elsewhere(Tensor& tensor) { return elsewhere(tensor.view()); }

// How an error goes on that names such a tensor.
inline constexpr const char* kGivenToTheCpu =
    " is in gpu memory, but the device works in host memory; give the GPU's device along with it";

}  // namespace switchyard::testing
