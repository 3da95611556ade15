// SPDX-License-Identifier: Apache-2.0
// A device's memory: taken, cleared, copied, brought there and back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"

namespace switchyard::testing::memory_contract_test {
namespace {

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::i32, Dtype::i64};

// Bytes that differ from their neighbours, and with the seed.
Tensor pattern(const Shape& shape, Dtype dtype, int seed) {
  Tensor result(shape, dtype);
  for (std::int64_t b = 0; b < result.bytes(); ++b) {
    result.data()[b] = static_cast<std::byte>((b * 31 + b / 251 + seed) % 253);
  }
  return result;
}

class MemoryContract : public OnDevices {
 protected:
  // Columns first … first + columns − 1 of a matrix, where it is.
  static TensorView cut(Tensor& wide, std::int64_t first, std::int64_t columns) {
    return {wide.data() + first * size_of(wide.dtype()),
            wide.dtype(),
            {wide.rows(), columns},
            wide.shape()[1],
            nullptr,
            wide.memory()};
  }
};
SWITCHYARD_ON_DEVICES(MemoryContract);

TEST_P(MemoryContract, ZeroPaddingClearsThoseRowsAlone) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t columns : {1, 7, 16, 100, 1032}) {
      for (const std::int64_t apart : {0, 1, 8}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(columns) + " + " +
                     std::to_string(apart));
        Tensor expected = pattern({19, columns + apart}, dtype, 1);
        std::vector<std::int32_t> valid(19);
        for (std::size_t r = 0; r < valid.size(); ++r)
          valid[r] = r % 3 == 1 ? 0 : r % 2 == 0 ? -1 : 1;
        Tensor rows = put(expected);
        const Tensor on_device = put(Tensor::from<std::int32_t>({19}, valid));
        backend_of(device).zero_padding(cut(rows, 0, columns), on_device);
        for (std::int64_t r = 1; r < 19; r += 3) {
          std::memset(expected.view().row(r), 0,
                      static_cast<std::size_t>(columns * size_of(dtype)));
        }
        EXPECT_TRUE(same_bits(get(rows), expected));
      }
    }
  }
}

TEST_P(MemoryContract, ZeroPaddingOfRowsOfSeveralDimensionsAndOfNone) {
  Tensor expected = pattern({3, 5, 2}, Dtype::bf16, 2);
  Tensor rows = put(expected);
  backend_of(device).zero_padding(rows, put(Tensor::from<std::int32_t>({3}, {1, 1, 0})));
  std::memset(expected.view().row(2), 0, 20);
  EXPECT_TRUE(same_bits(get(rows), expected));
  const Tensor none = put(Tensor({0}, Dtype::i32));
  backend_of(device).zero_padding(device.empty({0, 4}, Dtype::f32).view(), none);
}

TEST_P(MemoryContract, CopyOfRowsThatLieApartOnEitherSide) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t columns : {1, 7, 16, 100, 1032}) {
      for (const std::int64_t from_apart : {0, 1, 8}) {
        for (const std::int64_t to_apart : {0, 3, 8}) {
          for (const std::int64_t first : {0, 1}) {
            SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(columns) + " + " +
                         std::to_string(from_apart) + " to + " + std::to_string(to_apart) +
                         " from " + std::to_string(first));
            Tensor from = pattern({6, columns + from_apart + first}, dtype, 3);
            Tensor expected = pattern({6, columns + to_apart}, dtype, 4);
            Tensor device_from = put(from);
            Tensor device_to = put(expected);
            backend_of(device).copy(cut(device_from, first, columns), cut(device_to, 0, columns));
            for (std::int64_t r = 0; r < 6; ++r) {
              std::memcpy(expected.view().row(r), cut(from, first, columns).row(r),
                          static_cast<std::size_t>(columns * size_of(dtype)));
            }
            EXPECT_TRUE(same_bits(get(device_to), expected));
          }
        }
      }
    }
  }
}

// Sizes around those that one access, one warp and one block move.
TEST_P(MemoryContract, CopyOfContiguousMemoryOfAnySize) {
  for (const std::int64_t elements : {0, 1, 2, 3, 5, 7, 8, 9, 511, 512, 513, 8191, 100003}) {
    for (const std::int64_t first : {0, 1, 8}) {
      SCOPED_TRACE(std::to_string(elements) + " from " + std::to_string(first));
      const Tensor from = pattern({first + elements + 9}, Dtype::bf16, 5);
      Tensor expected = pattern({first + elements + 9}, Dtype::bf16, 6);
      const Tensor device_from = put(from);
      Tensor device_to = put(expected);
      backend_of(device).copy(device_from.view().slice(first, first + elements),
                              device_to.view().slice(first, first + elements));
      std::memcpy(expected.data() + 2 * first, from.data() + 2 * first,
                  static_cast<std::size_t>(2 * elements));
      EXPECT_TRUE(same_bits(get(device_to), expected));
    }
  }
}

TEST_P(MemoryContract, SetZeroClearsTheViewAlone) {
  for (const Dtype dtype : kDtypes) {
    Tensor expected = pattern({7, 13}, dtype, 7);
    Tensor whole = put(expected);
    device.set_zero(whole.view().slice(2, 5));
    std::memset(expected.view().row(2), 0, static_cast<std::size_t>(3 * 13 * size_of(dtype)));
    EXPECT_TRUE(same_bits(get(whole), expected));
    device.set_zero(cut(whole, 3, 4));
    for (std::int64_t r = 0; r < 7; ++r) {
      std::memset(expected.view().row(r) + 3 * size_of(dtype), 0,
                  static_cast<std::size_t>(4 * size_of(dtype)));
    }
    EXPECT_TRUE(same_bits(get(whole), expected));
  }
  device.set_zero(device.empty({0, 3}, Dtype::f32).view());
}

TEST_P(MemoryContract, SpoilFillsViewsWithNanWhereSomethingFailed) {
  for (const std::uint32_t failed : {0U, 1U, 0x80000000U}) {
    const Tensor word = put(Tensor::from<std::int32_t>({1}, {static_cast<std::int32_t>(failed)}));
    Tensor floats = pattern({7, 13}, Dtype::f32, 11);
    Tensor halves = pattern({3, 5, 201}, Dtype::bf16, 12);
    Tensor flat = pattern({70001}, Dtype::bf16, 13);
    Tensor device_floats = put(floats);
    Tensor device_halves = put(halves);
    Tensor device_flat = put(flat);
    Tensor empty = device.empty({0, 4}, Dtype::f32);
    const std::vector<TensorView> views{cut(device_floats, 3, 9), empty,
                                        device_halves.view().slice(1, 3), device_flat};
    backend_of(device).spoil(reinterpret_cast<const std::uint32_t*>(word.data()), views);
    backend_of(device).spoil(reinterpret_cast<const std::uint32_t*>(word.data()), {});
    if (failed != 0) {
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      for (std::int64_t r = 0; r < 7; ++r) {
        std::ranges::fill(floats.view().slice(r, r + 1).span<float>().subspan(3, 9), kNan);
      }
      std::ranges::fill(halves.view().slice(1, 3).span<Bfloat16>(), to_bfloat16(kNan));
      std::ranges::fill(flat.span<Bfloat16>(), to_bfloat16(kNan));
    }
    EXPECT_TRUE(same_bits(get(device_floats), floats));
    EXPECT_TRUE(same_bits(get(device_halves), halves));
    EXPECT_TRUE(same_bits(get(device_flat), flat));
  }
}

// Sizes around those of one parcel, at addresses that are aligned to no more than an element.
TEST_P(MemoryContract, UploadTakesTheBytesAtOnce) {
  for (const std::int64_t elements : {0, 1, 2, 3, 127, 128, 129, 1999, 2000, 2001, 4001, 12345}) {
    for (const std::int64_t first : {0, 1, 2}) {
      SCOPED_TRACE(std::to_string(elements) + " to " + std::to_string(first));
      Tensor expected = pattern({first + elements + 3}, Dtype::bf16, 8);
      Tensor to = put(expected);
      Tensor from = pattern({elements}, Dtype::bf16, 9);
      std::memcpy(expected.data() + 2 * first, from.data(), static_cast<std::size_t>(from.bytes()));
      backend_of(device).upload({from.data(), static_cast<std::size_t>(from.bytes())},
                                to.view().slice(first, first + elements));
      poison(from);
      EXPECT_TRUE(same_bits(get(to), expected));
    }
  }
}

TEST_P(MemoryContract, FetchBringsAViewAndIsCounted) {
  const Tensor expected = pattern({9, 5}, Dtype::i64, 10);
  const Tensor on_device = put(expected);
  Tensor part({3, 5}, Dtype::i64);
  const auto before = backend_of(device).host_syncs();
  backend_of(device).fetch(on_device.view().slice(4, 7),
                           {part.data(), static_cast<std::size_t>(part.bytes())});
  EXPECT_TRUE(same_bits(part, expected.view().slice(4, 7)));
  EXPECT_EQ(backend_of(device).host_syncs() - before, device.memory() == Memory::gpu ? 1 : 0);
}

TEST_P(MemoryContract, TakenMemoryIsTheDevicesOwnAndIsReused) {
  const auto& backend = backend_of(device);
  const Shape shape{64, 100};
  const std::byte* address = nullptr;
  {
    const TensorView first = backend.take(shape, Dtype::f32);
    const TensorView second = backend.take(shape, Dtype::f32);
    EXPECT_EQ(first.memory(), device.memory());
    EXPECT_EQ(first.shape(), shape);
    EXPECT_TRUE(first.is_contiguous());
    EXPECT_NE(first.data(), second.data());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.data()) % 64, 0U);
    address = first.data();
  }
  const auto held = backend.bytes_held();
  EXPECT_GE(held, 2 * 64 * 100 * 4);
  const TensorView again = backend.take(shape, Dtype::f32);
  const TensorView other = backend.take(shape, Dtype::f32);
  EXPECT_TRUE(again.data() == address || other.data() == address);
  EXPECT_EQ(backend.bytes_held(), held);
}

}  // namespace
}  // namespace switchyard::testing::memory_contract_test
