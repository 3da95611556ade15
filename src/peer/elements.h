// SPDX-License-Identifier: Apache-2.0
// Treats several tensors as one list of elements, and copies pieces of it to and from a buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device_backend.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Returns the elements of a contiguous buffer from `first` on, as a matrix.
inline TensorView part_of_buffer(const TensorView& buffer, std::int64_t first, const Shape& shape) {
  return {buffer.data() + first * size_of(buffer.dtype()),
          buffer.dtype(),
          shape,
          shape.row_elements(),
          buffer.owner(),
          buffer.memory()};
}

// The elements of several views of one dtype, concatenated. Rows may be strided.
template <typename View>
class Elements {
 public:
  explicit Elements(std::span<const View> views) : views_(views.begin(), views.end()) {
    for (const View& view : views_) count_ += view.shape().num_elements();
  }

  std::int64_t count() const { return count_; }

  // Copies elements [first, first + count) to the start of a contiguous buffer that the device can
  // reach.
  void read(const DeviceBackend& device, std::int64_t first, std::int64_t count,
            const TensorView& buffer) const {
    for_each_piece(first, count, [&](const View& piece, std::int64_t at) {
      device.copy(piece, part_of_buffer(buffer, at, piece.shape()));
    });
  }
  // Copies the start of the buffer to elements [first, first + count).
  void write(const DeviceBackend& device, std::int64_t first, std::int64_t count,
             const TensorView& buffer) const {
    for_each_piece(first, count, [&](const View& piece, std::int64_t at) {
      device.copy(part_of_buffer(buffer, at, piece.shape()), piece);
    });
  }

  // Returns a view of the elements if they are contiguous in memory, otherwise a default view.
  View lying_together(std::int64_t first, std::int64_t count) const {
    View found;
    int num_pieces = 0;
    for_each_piece(first, count, [&](const View& piece, std::int64_t) {
      found = piece;
      ++num_pieces;
    });
    return num_pieces == 1 && found.is_contiguous() ? found : View();
  }

 private:
  // Calls visit(piece [rows, columns], number of elements before it).
  template <typename Visit>
  void for_each_piece(std::int64_t first, std::int64_t count, const Visit& visit) const {
    std::int64_t at = 0;
    for (const View& view : views_) {
      const std::int64_t size = view.shape().num_elements();
      const std::int64_t begin = std::min(first, size);
      const std::int64_t end = std::min(first + count - at, size);
      first -= begin;
      if (begin >= end) continue;
      visit_range(view, begin, end, [&](const View& piece) {
        visit(piece, at);
        at += piece.shape().num_elements();
      });
    }
  }

  // Visits the tail of a row, then whole rows, then the head of a row, where present.
  template <typename Visit>
  static void visit_range(const View& view, std::int64_t begin, std::int64_t end,
                          const Visit& visit) {
    const bool together = view.is_contiguous();
    const std::int64_t columns =
        together ? view.shape().num_elements() : view.shape().row_elements();
    const std::int64_t stride = together ? columns : view.row_stride();
    while (begin < end) {
      const std::int64_t column = begin % columns;
      const bool has_whole_rows = column == 0 && end - begin >= columns;
      const Shape shape = has_whole_rows ? Shape{(end - begin) / columns, columns}
                                         : Shape{1, std::min(columns - column, end - begin)};
      const std::int64_t offset = begin / columns * stride + column;
      visit(View(view.data() + offset * size_of(view.dtype()), view.dtype(), shape, stride,
                 view.owner(), view.memory()));
      begin += shape.num_elements();
    }
  }

  std::vector<View> views_;
  std::int64_t count_ = 0;
};

}  // namespace switchyard
