// Lays out safetensors files that are to be written.
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

// Tensors lie back to back from a multiple of 64 on, those of large elements first and then by
// name, so that each is aligned to its elements.
struct SafetensorsLayout {
  std::string head;                             // the length and the header, which begin the file
  std::map<std::string, std::int64_t> offsets;  // in the file, of every tensor
  std::int64_t bytes = 0;                       // of the file
};
SafetensorsLayout lay_out(const std::map<std::string, TensorForm>& tensors,
                          const std::map<std::string, std::string>& metadata);

// InvalidArgument if a file cannot have these names, or these strings in its metadata.
void require_tensor_name(std::string_view name);
void require_metadata(const std::map<std::string, std::string>& metadata);

}  // namespace switchyard
