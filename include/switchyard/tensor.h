// SPDX-License-Identifier: Apache-2.0
// Dense memory with a dtype and a shape: Tensor owns it, TensorView and ConstTensorView refer to
// it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "switchyard/export.h"

namespace switchyard {

// The type of a tensor's elements. f16 occurs in checkpoints only: nothing computes in it.
enum class Dtype : std::int8_t { f32, bf16, i32, i64, f16 };

// Returns the bytes of one element.
constexpr std::int64_t size_of(Dtype dtype) {
  if (dtype == Dtype::bf16 || dtype == Dtype::f16) return 2;
  return dtype == Dtype::i64 ? 8 : 4;
}
// Returns the name of the enumerator.
SWITCHYARD_API std::string_view name_of(Dtype dtype);

// The kind of memory that a tensor is in: accessible to the program itself, or only to the kernels
// of a GPU.
enum class Memory : std::int8_t { host, gpu };
SWITCHYARD_API std::string_view name_of(Memory memory);

// Says whether a result replaces the previous contents of its tensor or is added to them.
enum class GradientMode { overwrite, accumulate };

// The upper half of an IEEE float. Arithmetic is done in float; converting back rounds to nearest
// even and preserves NaNs.
struct Bfloat16 {
  std::uint16_t bits = 0;
};
// Converts between bf16 and f32.
SWITCHYARD_API float to_float(Bfloat16 value);
SWITCHYARD_API Bfloat16 to_bfloat16(float value);

// An IEEE binary16 number. Every value is exactly representable as a float.
struct Float16 {
  std::uint16_t bits = 0;
};
// Converts exactly.
SWITCHYARD_API float to_float(Float16 value);

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> : std::integral_constant<Dtype, Dtype::f32> {};
template <>
struct DtypeOf<Bfloat16> : std::integral_constant<Dtype, Dtype::bf16> {};
template <>
struct DtypeOf<std::int32_t> : std::integral_constant<Dtype, Dtype::i32> {};
template <>
struct DtypeOf<std::int64_t> : std::integral_constant<Dtype, Dtype::i64> {};
template <>
struct DtypeOf<Float16> : std::integral_constant<Dtype, Dtype::f16> {};

// The extents of a tensor, one to four, outermost first. Constructors throw InvalidArgument for a
// negative extent, or for more elements than can be addressed.
class SWITCHYARD_API Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;  // [0]
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(std::span<const std::int64_t> extents);

  int rank() const { return rank_; }
  std::int64_t operator[](int dim) const {
    if (dim < 0 || dim >= rank_) [[unlikely]] {
      refuse_extent(dim);
    }
    return extents_[static_cast<std::size_t>(dim)];
  }
  std::int64_t num_elements() const;
  // The number of elements per row, that is, per index of the first dimension.
  std::int64_t row_elements() const;
  // Returns the same shape with another first extent.
  Shape with_rows(std::int64_t rows) const;
  std::string to_string() const;

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  [[noreturn]] void refuse_extent(int dim) const;

  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 1;
};

namespace detail {
SWITCHYARD_API void require_host(Memory memory, const Shape& shape);
SWITCHYARD_API void require_span(Dtype actual, Dtype wanted, bool contiguous, const Shape& shape);
SWITCHYARD_API void require_slice(std::int64_t begin, std::int64_t end, const Shape& shape);
[[noreturn]] SWITCHYARD_API void refuse_row(std::int64_t index, const Shape& shape);
SWITCHYARD_API void require_view(const void* data, Dtype dtype, const Shape& shape,
                                 std::int64_t row_stride);
}  // namespace detail

// A view of rows: each row is contiguous, and consecutive rows are `row_stride` elements apart. A
// view made from a Tensor shares its ownership and keeps its memory alive; a view of foreign memory
// has no owner. GPU memory must be declared as such, because a pointer does not tell. The memory of
// a non-empty view must be aligned to its elements. A moved-from view equals a default one.
template <typename Byte>
class BasicTensorView {
 public:
  // T, or const T in a view that is only read.
  template <typename T>
  using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;
  using Owner = std::shared_ptr<Byte>;

  BasicTensorView() = default;

  // Views contiguous foreign memory.
  template <typename T>
  BasicTensorView(T* data, const Shape& shape, Memory memory = Memory::host)
      : BasicTensorView(reinterpret_cast<Byte*>(data), DtypeOf<std::remove_const_t<T>>::value,
                        shape, shape.row_elements(), nullptr, memory) {}

  BasicTensorView(Byte* data, Dtype dtype, const Shape& shape, std::int64_t row_stride,
                  Owner owner = nullptr, Memory memory = Memory::host)
      : data_(data),
        dtype_(dtype),
        memory_(memory),
        shape_(shape),
        row_stride_(row_stride),
        owner_(std::move(owner)) {
    detail::require_view(data, dtype, shape, row_stride);
  }

  BasicTensorView(const BasicTensorView&) = default;
  BasicTensorView& operator=(const BasicTensorView&) = default;
  BasicTensorView(BasicTensorView&& other) noexcept { take(other); }
  BasicTensorView& operator=(BasicTensorView&& other) noexcept {
    if (this != &other) take(other);
    return *this;
  }

  // Converts a mutable view to a constant one.
  operator BasicTensorView<const std::byte>() const requires(!std::is_const_v<Byte>) {
    return {data_, dtype_, shape_, row_stride_, owner_, memory_};
  }

  Byte* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  Memory memory() const { return memory_; }
  const Shape& shape() const { return shape_; }
  std::int64_t rows() const { return shape_[0]; }
  std::int64_t row_stride() const { return row_stride_; }
  std::int64_t row_bytes() const { return shape_.row_elements() * size_of(dtype_); }
  std::int64_t row_stride_bytes() const { return row_stride_ * size_of(dtype_); }
  std::int64_t bytes() const { return rows() * row_bytes(); }
  // Returns the address of a row; index rows() gives the end. Throws InvalidArgument beyond that.
  Byte* row(std::int64_t index) const {
    if (index < 0 || index > rows()) [[unlikely]] {
      detail::refuse_row(index, shape_);
    }
    return data_ + index * row_stride_bytes();
  }
  bool is_contiguous() const { return rows() <= 1 || row_stride_ == shape_.row_elements(); }
  // The owner that keeps the memory alive; null for foreign memory.
  const Owner& owner() const { return owner_; }

  // Returns a view of rows begin … end − 1. Throws InvalidArgument if they are not within the view.
  BasicTensorView slice(std::int64_t begin, std::int64_t end) const {
    detail::require_slice(begin, end, shape_);
    return {row(begin), dtype_, shape_.with_rows(end - begin), row_stride_, owner_, memory_};
  }

  // Returns all elements in order. Throws InvalidArgument unless the view is contiguous, of type T,
  // and in host memory.
  template <typename T>
  std::span<Element<T>> span() const {
    if (memory_ != Memory::host) detail::require_host(memory_, shape_);
    detail::require_span(dtype_, DtypeOf<T>::value, is_contiguous(), shape_);
    return {reinterpret_cast<Element<T>*>(data_), static_cast<std::size_t>(shape_.num_elements())};
  }

 private:
  void take(BasicTensorView& other) {
    data_ = std::exchange(other.data_, nullptr);
    dtype_ = std::exchange(other.dtype_, Dtype::f32);
    memory_ = std::exchange(other.memory_, Memory::host);
    shape_ = std::exchange(other.shape_, Shape());
    row_stride_ = std::exchange(other.row_stride_, 1);
    owner_ = std::move(other.owner_);
  }

  Byte* data_ = nullptr;
  Dtype dtype_ = Dtype::f32;
  Memory memory_ = Memory::host;
  Shape shape_;
  std::int64_t row_stride_ = 1;
  Owner owner_;
};

// A view to be read and written; a ConstTensorView is only read.
using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

// Owns contiguous memory, aligned to a cache line, or shares memory of a device. A move is cheap
// and leaves a default tensor behind. Copies are explicit: clone(), or Device::copy_of for a tensor
// that is not in host memory.
class SWITCHYARD_API Tensor {
 public:
  Tensor() = default;                       // [0] f32
  Tensor(const Shape& shape, Dtype dtype);  // uninitialised, in host memory
  // Returns a tensor that shares the memory of a contiguous view with an owner. Throws
  // InvalidArgument for any other view.
  static Tensor of(const TensorView& owned);
  static Tensor zeros(const Shape& shape, Dtype dtype);
  template <typename T>
  static Tensor from(const Shape& shape, std::span<const T> values) {
    return from_bytes(shape, DtypeOf<T>::value, std::as_bytes(values));
  }
  // Does the same for a list in braces.
  template <typename T>
  static Tensor from(const Shape& shape, std::initializer_list<T> values) {
    return from(shape, std::span<const T>(values.begin(), values.size()));
  }

  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor clone() const;

  Dtype dtype() const { return view_.dtype(); }
  Memory memory() const { return view_.memory(); }
  const Shape& shape() const { return view_.shape(); }
  std::int64_t rows() const { return view_.rows(); }
  std::int64_t bytes() const { return view_.bytes(); }
  std::byte* data() { return view_.data(); }
  const std::byte* data() const { return view_.data(); }

  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }
  operator TensorView() { return view_; }
  operator ConstTensorView() const { return view_; }

  template <typename T>
  std::span<T> span() {
    return view_.span<T>();
  }
  template <typename T>
  std::span<const T> span() const {
    return ConstTensorView(view_).span<T>();
  }

 private:
  static Tensor from_bytes(const Shape& shape, Dtype dtype, std::span<const std::byte> values);

  TensorView view_;
};

}  // namespace switchyard
