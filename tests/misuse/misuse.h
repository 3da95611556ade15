// SPDX-License-Identifier: Apache-2.0
// A table of public functions and what they must refuse.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::misuse {

// How an argument is wrong.
enum class Kind {
  null,
  empty,
  dtype,
  device,
  shape,
  overlapping,
  misaligned,
  huge,
  moved_from,
  out_of_range
};

struct Misuse {
  std::string function;  // as check_functions.py shortens what nm prints
  Kind kind;
  std::function<void()> call;  // throws an Error
  std::string words;           // which its message has
};

// The parts of the table, each in a file of its own.
std::vector<Misuse> of_tensors();
std::vector<Misuse> of_ranks();
std::vector<Misuse> of_parallel();
std::vector<Misuse> of_plans();
std::vector<Misuse> of_experts();
std::vector<Misuse> of_layers();
std::vector<Misuse> of_files();
std::vector<Misuse> of_c_devices();
std::vector<Misuse> of_c_ranks();

constexpr std::int64_t kHuge = std::int64_t{1} << 40;

inline Tensor floats(const Shape& shape) { return Tensor::zeros(shape, Dtype::f32); }
inline Tensor ints(const Shape& shape) { return Tensor::zeros(shape, Dtype::i32); }

// Says that it is in a GPU's memory.
template <typename View>
View on_a_gpu(const View& view) {
  return {view.data(), view.dtype(), view.shape(), view.row_stride(), view.owner(), Memory::gpu};
}
inline TensorView on_a_gpu(Tensor& tensor) { return on_a_gpu(tensor.view()); }

inline TensorView at_a_null_pointer(const Shape& shape) {
  return {static_cast<float*>(nullptr), shape};
}

}  // namespace switchyard::misuse
