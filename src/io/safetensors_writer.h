// SPDX-License-Identifier: Apache-2.0
// Computes the layout of safetensors files to be written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "switchyard/tensor.h"

namespace switchyard {

struct TensorForm {
  Dtype dtype = Dtype::f32;
  Shape shape;

  std::int64_t bytes() const { return shape.num_elements() * size_of(dtype); }
  std::string to_string() const;  // "f32 [2,3]"
  friend bool operator==(const TensorForm&, const TensorForm&) = default;
};
inline TensorForm form_of(const ConstTensorView& view) { return {view.dtype(), view.shape()}; }

// Tensors lie back to back, starting at a multiple of 64 bytes. They are sorted by element size,
// largest first, and then by name, so that each tensor is aligned to its elements.
struct SafetensorsLayout {
  std::string head;                             // the first bytes of the file: length and header
  std::map<std::string, std::int64_t> offsets;  // where every tensor starts in the file
  std::int64_t bytes = 0;                       // the size of the file
};
SafetensorsLayout lay_out(const std::map<std::string, TensorForm>& tensors,
                          const std::map<std::string, std::string>& metadata);

// Throw InvalidArgument if a file cannot store this tensor name or these metadata strings.
void require_tensor_name(std::string_view name);
void require_metadata(const std::map<std::string, std::string>& metadata);

}  // namespace switchyard
