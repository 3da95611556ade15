// SPDX-License-Identifier: Apache-2.0
// Rows and matrices in GPU memory, surrounded by NaN that no kernel may overwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/cuda/grouped_gemm.h"
#include "support/compare.h"
#include "switchyard/device.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// The layout of a test's GPU tensors.
struct Layout {
  bool scattered = false;  // matrices are not evenly spaced
  std::int64_t spare = 0;  // elements between rows and before the first row
};

// [rows, columns]
class ApartRows {
 public:
  ApartRows(const Device& device, const ConstTensorView& contents, const Layout& layout);

  cuda::Rows rows() const;
  std::byte* row(std::int64_t index) const;
  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(row(0));
  }
  // Returns the current contents. Fails the test if anything between the rows was written.
  Tensor fetch() const;

 private:
  Device device_;
  Shape shape_;
  Dtype dtype_;
  std::int64_t spare_;
  Tensor memory_;
};

// [groups, parts, rows, columns]: one or two matrices per group.
struct StackShape {
  int groups = 0;
  int parts = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  Shape stacked() const { return {groups * parts * rows, columns}; }
};
// Returns the matrices of a stack as [part · groups + group].
std::vector<ConstTensorView> matrices_of(const ConstTensorView& stack, const StackShape& shape);

class ApartMatrices {
 public:
  ApartMatrices(const Device& device, const ConstTensorView& stack, const StackShape& shape,
                const Layout& layout);

  // Returns references in the order of GroupMatrices: for group `only`, or for all groups if it is
  // −1.
  std::vector<cuda::MatrixRef> refs(int only) const;
  // [part · groups + group]
  std::vector<ConstTensorView> fetch() const;

 private:
  std::int64_t first_row(int group, int part) const;

  StackShape shape_;
  bool scattered_;
  ApartRows rows_;
};

}  // namespace switchyard::testing
