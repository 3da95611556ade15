// SPDX-License-Identifier: Apache-2.0
// Dtypes, shapes and owned memory.
#include "switchyard/tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <new>

#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::string_view kUnknown = "unknown";
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Large blocks use huge pages: rows are read in random order, and with small pages the TLB misses
// cost as much as reading the rows.
std::shared_ptr<std::byte> allocate(std::int64_t bytes) {
  const auto count = static_cast<std::size_t>(bytes);
  const bool huge = count >= 2 * kHugePage;
  const std::align_val_t alignment{huge ? kHugePage : kCacheLine};
  auto* data = static_cast<std::byte*>(::operator new(count, alignment, std::nothrow));
  require<DeviceError>(data != nullptr, "cannot allocate {} bytes of host memory", bytes);
  if (huge) ::madvise(data, count, MADV_HUGEPAGE);  // a hint that may be ignored
  return {data, [alignment](std::byte* p) { ::operator delete(p, alignment); }};
}

}  // namespace

std::string_view name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return "f32";
    case Dtype::bf16:
      return "bf16";
    case Dtype::i32:
      return "i32";
    case Dtype::i64:
      return "i64";
    case Dtype::f16:
      return "f16";
  }
  return kUnknown;
}

float to_float(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

Bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

// Computes only with normal floats: the calling thread may treat subnormals as zero.
float to_float(Float16 value) {
  constexpr std::uint32_t kSmallestNormal = 0x38800000U;  // 2⁻¹⁴ as a float
  const std::uint32_t sign = (value.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = (value.bits & 0x7fffU) << 13;  // still with the f16 bias
  const std::uint32_t exponent = magnitude >> 23;
  std::uint32_t bits = magnitude + (112U << 23);
  if (exponent == 31) {
    bits = magnitude | 0x7f800000U;
  } else if (exponent == 0) {
    bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude + kSmallestNormal) -
                                        std::bit_cast<float>(kSmallestNormal));
  }
  return std::bit_cast<float>(sign | bits);
}

Shape::Shape(std::initializer_list<std::int64_t> extents)
    : Shape(std::span(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const std::int64_t> extents) {
  require(!extents.empty() && extents.size() <= kMaxRank, "a shape has 1 to {} extents, not {}",
          int{kMaxRank}, extents.size());
  rank_ = static_cast<int>(extents.size());
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    require(extents[i] >= 0, "extent {} of shape [{}] is negative", i, fmt::join(extents, ", "));
    // The largest element has eight bytes, so a byte count never overflows either.
    require(extents[i] <= std::numeric_limits<std::int64_t>::max() / 8 / elements,
            "shape [{}] has too many elements to address", fmt::join(extents, ", "));
    elements *= std::max<std::int64_t>(extents[i], 1);  // row_elements() must fit even with 0 rows
    extents_[i] = extents[i];
  }
}

void Shape::refuse_extent(int dim) const {
  throw InvalidArgument(fmt::format("there is no extent {} in shape {}", dim, *this));
}

std::int64_t Shape::num_elements() const { return extents_[0] * row_elements(); }

std::int64_t Shape::row_elements() const {
  std::int64_t elements = 1;
  for (int i = 1; i < rank_; ++i) elements *= (*this)[i];
  return elements;
}

Shape Shape::with_rows(std::int64_t rows) const {
  Shape result = *this;
  result.extents_[0] = rows;
  return Shape(std::span(result.extents_).first(static_cast<std::size_t>(rank_)));
}

std::string Shape::to_string() const {
  return fmt::format("[{}]",
                     fmt::join(std::span(extents_).first(static_cast<std::size_t>(rank_)), ","));
}

std::string_view name_of(Memory memory) { return memory == Memory::host ? "host" : "gpu"; }

namespace detail {

void require_host(Memory memory, const Shape& shape) {
  require(
      memory == Memory::host,
      "a tensor {} in GPU memory cannot be read by the host: copy it with Device::to_host first",
      shape);
}

void require_span(Dtype actual, Dtype wanted, bool contiguous, const Shape& shape) {
  require(actual == wanted, "a tensor {} of {} was read as {}", shape, name_of(actual),
          name_of(wanted));
  require(contiguous, "a tensor {} whose rows are not contiguous has no span", shape);
}

void require_slice(std::int64_t begin, std::int64_t end, const Shape& shape) {
  require(0 <= begin && begin <= end && end <= shape[0], "rows {} to {} are not a slice of {}",
          begin, end, shape);
}

void refuse_row(std::int64_t index, const Shape& shape) {
  throw InvalidArgument(fmt::format("there is no row {} in {}", index, shape));
}

void require_view(const void* data, Dtype dtype, const Shape& shape, std::int64_t row_stride) {
  require(row_stride >= shape.row_elements(), "row stride {} is less than a row of {}", row_stride,
          shape);
  require(name_of(dtype) != kUnknown, "there is no dtype {}", static_cast<int>(dtype));
  if (shape.num_elements() == 0) return;
  require(data != nullptr, "a tensor {} of {} is a null pointer", shape, name_of(dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(address % static_cast<std::uintptr_t>(size_of(dtype)) == 0,
          "a tensor {} of {} is at {:#x}, which is not aligned to its elements of {} bytes", shape,
          name_of(dtype), address, size_of(dtype));
  require(row_stride <= std::numeric_limits<std::int64_t>::max() / 8 / shape[0],
          "row stride {} is too large to address the rows of {}", row_stride, shape);
}

}  // namespace detail

Tensor::Tensor(const Shape& shape, Dtype dtype) {
  auto memory = allocate(shape.num_elements() * size_of(dtype));
  auto* data = memory.get();
  view_ = TensorView(data, dtype, shape, shape.row_elements(), std::move(memory));
}

Tensor Tensor::of(const TensorView& owned) {
  require(owned.owner() != nullptr && owned.is_contiguous(),
          "only a contiguous view of memory with an owner can become a tensor; this view {} has {}",
          owned.shape(), owned.owner() == nullptr ? "none" : "rows apart");
  Tensor result;
  result.view_ = owned;
  return result;
}

Tensor Tensor::zeros(const Shape& shape, Dtype dtype) {
  Tensor result(shape, dtype);
  std::memset(result.data(), 0, static_cast<std::size_t>(result.bytes()));
  return result;
}

Tensor Tensor::from_bytes(const Shape& shape, Dtype dtype, std::span<const std::byte> values) {
  Tensor result(shape, dtype);
  require(values.size() == static_cast<std::size_t>(result.bytes()),
          "{} values were given for a tensor {}",
          values.size() / static_cast<std::size_t>(size_of(dtype)), shape);
  if (!values.empty()) std::memcpy(result.data(), values.data(), values.size());
  return result;
}

Tensor Tensor::clone() const {
  detail::require_host(memory(), shape());
  return from_bytes(shape(), dtype(),
                    std::span(data(), data() == nullptr ? 0 : static_cast<std::size_t>(bytes())));
}

}  // namespace switchyard
