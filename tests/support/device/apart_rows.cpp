// SPDX-License-Identifier: Apache-2.0
#include "support/device/apart_rows.h"

#include <gtest/gtest.h>

#include <cstring>

#include "support/compare.h"

namespace switchyard::testing {
namespace {

// Returns a view of strided rows inside a larger block of memory.
TensorView rows_in(Tensor& memory, const Shape& shape, std::int64_t spare) {
  const TensorView all = memory.view();
  return {all.data() + spare * size_of(all.dtype()),
          all.dtype(),
          shape,
          shape.row_elements() + spare,
          all.owner(),
          all.memory()};
}

// Reverses the matrices of a stack. Their stride is then negative, which no tensor map can
// describe.
Tensor reversed(const ConstTensorView& stack, std::int64_t matrix_rows) {
  Tensor result(stack.shape(), stack.dtype());
  for (std::int64_t first = 0; first < stack.rows(); first += matrix_rows) {
    const std::int64_t to = stack.rows() - matrix_rows - first;
    Device().copy(stack.slice(first, first + matrix_rows),
                  result.view().slice(to, to + matrix_rows));
  }
  return result;
}

ApartRows place(const Device& device, const ConstTensorView& stack, const StackShape& shape,
                const Layout& layout) {
  if (!layout.scattered) return {device, stack, layout};
  return {device, reversed(stack, shape.rows), layout};
}

}  // namespace

std::vector<ConstTensorView> matrices_of(const ConstTensorView& stack, const StackShape& shape) {
  std::vector<ConstTensorView> matrices;
  for (int part = 0; part < shape.parts; ++part) {
    for (int group = 0; group < shape.groups; ++group) {
      const std::int64_t first = (group * shape.parts + part) * shape.rows;
      matrices.push_back(stack.slice(first, first + shape.rows));
    }
  }
  return matrices;
}

ApartRows::ApartRows(const Device& device, const ConstTensorView& contents, const Layout& layout)
    : device_(device), shape_(contents.shape()), dtype_(contents.dtype()), spare_(layout.spare) {
  const std::int64_t stride = shape_.row_elements() + spare_;
  Tensor memory = poisoned({spare_ + shape_[0] * stride}, dtype_);
  Device().copy(contents, rows_in(memory, shape_, spare_));
  memory_ = device.copy_of(memory);
}

cuda::Rows ApartRows::rows() const { return {row(0), shape_.row_elements() + spare_}; }

std::byte* ApartRows::row(std::int64_t index) const {
  const std::int64_t elements = spare_ + index * (shape_.row_elements() + spare_);
  return const_cast<std::byte*>(memory_.data()) + elements * size_of(dtype_);
}

Tensor ApartRows::fetch() const {
  Tensor memory = device_.to_host(memory_);
  const TensorView now = rows_in(memory, shape_, spare_);
  Tensor result(shape_, dtype_);
  Device().copy(now, result);
  poison(now);
  EXPECT_TRUE(same_bits(memory, poisoned(memory.shape(), dtype_))) << "between rows";
  return result;
}

ApartMatrices::ApartMatrices(const Device& device, const ConstTensorView& stack,
                             const StackShape& shape, const Layout& layout)
    : shape_(shape), scattered_(layout.scattered), rows_(place(device, stack, shape, layout)) {}

std::int64_t ApartMatrices::first_row(int group, int part) const {
  const int place = group * shape_.parts + part;
  return (scattered_ ? shape_.groups * shape_.parts - 1 - place : place) * shape_.rows;
}

std::vector<cuda::MatrixRef> ApartMatrices::refs(int only) const {
  const std::int64_t stride = rows_.rows().stride;
  std::vector<cuda::MatrixRef> refs;
  for (int part = 0; part < shape_.parts; ++part) {
    for (int group = 0; group < shape_.groups; ++group) {
      if (only >= 0 && group != only) continue;
      refs.push_back({rows_.row(first_row(group, part)), stride});
    }
  }
  return refs;
}

std::vector<ConstTensorView> ApartMatrices::fetch() const {
  const Tensor all = rows_.fetch();
  return scattered_ ? matrices_of(reversed(all, shape_.rows), shape_) : matrices_of(all, shape_);
}

}  // namespace switchyard::testing
