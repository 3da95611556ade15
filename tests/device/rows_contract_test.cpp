// SPDX-License-Identifier: Apache-2.0
// Rows to their places and back on every device against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/row_sizes.h"
#include "support/random.h"

namespace switchyard::testing::rows_contract_test {
namespace {

// Every width and odd size, in both dtypes; those of aligned rows are among them.
std::vector<RowSizes> many_sizes() {
  std::vector<RowSizes> result;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const std::int64_t width : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}) {
      for (const std::int64_t hidden : {1, 7, 33, 100, 264, 2048}) {
        result.push_back({5, width, hidden, 1, 0, dtype});
      }
      result.push_back({4, width, 72, 3, 8, dtype});
      result.push_back({4, width, 35, 2, 3, dtype});
    }
    result.push_back({0, 3, 64, 1, 0, dtype});
    result.push_back({1, 1024, 40, 2, 0, dtype});
    result.push_back({3, 2, 7168, 1, 1, dtype});
    result.push_back({70, 8, 520, 1, 0, dtype});
  }
  return result;
}

// Places without two alike, in order of nothing; about a fifth of the entries have none.
struct Places {
  std::int64_t rows = 0;
  Tensor slots;
  Tensor buffers;

  explicit Places(const RowSizes& s)
      : rows(s.count * s.width / s.buffers + 3),
        slots({s.count * s.width}, Dtype::i32),
        buffers({s.count * s.width}, Dtype::i32) {
    std::vector<std::int32_t> free(static_cast<std::size_t>(rows * s.buffers));
    std::iota(free.begin(), free.end(), 0);
    Random random(static_cast<std::uint64_t>(s.width * 10007 + s.hidden));
    for (std::size_t i = 0; i < slots.span<std::int32_t>().size(); ++i) {
      const auto other =
          i + static_cast<std::size_t>(random.below(static_cast<std::int64_t>(free.size() - i)));
      std::swap(free[i], free[other]);
      const bool none = random.below(5) == 0;
      slots.span<std::int32_t>()[i] = none ? -1 : static_cast<std::int32_t>(free[i] % rows);
      buffers.span<std::int32_t>()[i] = none ? -1 : static_cast<std::int32_t>(free[i] / rows);
    }
  }
};

std::vector<Tensor> poisoned(int count, const Shape& shape, Dtype dtype) {
  std::vector<Tensor> result;
  for (int b = 0; b < count; ++b) {
    result.emplace_back(shape, dtype);
    poison(result.back());
  }
  return result;
}

class RowsContract : public OnDevices {
 protected:
  // Copies of the tables and buffers in the device's memory.
  struct OnDevice {
    Tensor slots;
    Tensor buffers;
    std::vector<Tensor> rows;
    std::vector<std::byte*> bases;
    std::vector<Tensor> scalars;
    std::vector<std::byte*> scalar_bases;
    RowTable table;
  };

  void fill(OnDevice& d, const RowSizes& s, const Places& places, const std::vector<Tensor>& rows,
            const std::vector<Tensor>& scalars) const {
    d.slots = put(places.slots);
    d.buffers = put(places.buffers);
    for (const auto& t : rows) d.rows.push_back(put(t));
    for (const auto& t : scalars) d.scalars.push_back(put(t));
    for (auto& t : d.rows) d.bases.push_back(t.data());
    for (auto& t : d.scalars) d.scalar_bases.push_back(t.data());
    const auto* buffers = reinterpret_cast<const std::int32_t*>(d.buffers.data());
    d.table = {s.count, s.width, reinterpret_cast<const std::int32_t*>(d.slots.data()),
               s.buffers > 1 ? buffers : nullptr, d.bases};
  }

  static const float* floats(const Tensor& t) { return reinterpret_cast<const float*>(t.data()); }

  bool fused() const { return device.memory() == Memory::gpu; }

  void scatter(const RowSizes& s, bool scaled) const;
  void gather(const RowSizes& s, bool weighted) const;
  void dot(const RowSizes& s) const;
};
SWITCHYARD_ON_DEVICES(RowsContract);

void RowsContract::scatter(const RowSizes& s, bool scaled) const {
  SCOPED_TRACE(text_of(s));
  const Places places(s);
  const Tensor from = Random(3).tensor({s.count, s.hidden + s.apart}, s.dtype);
  const Tensor scale = Random(4).tensor({s.count * s.width}, Dtype::f32);
  const Tensor scalars = Random(5).tensor({s.count * s.width}, Dtype::f32);
  auto rows = poisoned(s.buffers, {places.rows, s.hidden}, s.dtype);
  auto row_scalars = poisoned(s.buffers, {places.rows}, Dtype::f32);
  OnDevice d;
  fill(d, s, places, rows, row_scalars);
  Tensor device_from = put(from);
  const Tensor device_scale = put(scale);
  const Tensor device_scalars = put(scalars);
  backend_of(device).scatter_rows({.from = cut(device_from, s.hidden),
                                   .scale = scaled ? floats(device_scale) : nullptr,
                                   .to = d.table,
                                   .scalars = floats(device_scalars),
                                   .scalar_bases = d.scalar_bases});
  for (std::int64_t entry = 0; entry < s.count * s.width; ++entry) {
    const auto at = static_cast<std::size_t>(entry);
    const auto slot = places.slots.span<std::int32_t>()[at];
    if (slot < 0) continue;
    const auto buffer = static_cast<std::size_t>(places.buffers.span<std::int32_t>()[at]);
    row_scalars[buffer].span<float>()[static_cast<std::size_t>(slot)] = scalars.span<float>()[at];
    for (std::int64_t c = 0; c < s.hidden; ++c) {
      const float value = value_at(from, entry / s.width, c);
      set_at(rows[buffer], slot, c, scaled ? scale.span<float>()[at] * value : value);
    }
  }
  for (std::size_t b = 0; b < rows.size(); ++b) {
    EXPECT_TRUE(same_bits(get(d.rows[b]), rows[b])) << "buffer " << b;
    EXPECT_TRUE(same_bits(get(d.scalars[b]), row_scalars[b])) << "scalars " << b;
  }
}

TEST_P(RowsContract, ScatterWritesEveryPlaceAndNoOther) {
  for (const RowSizes& s : many_sizes()) {
    scatter(s, false);
    scatter(s, true);
  }
}

// The sum in the order of the entry; a GPU multiplies and adds in one step.
float expected_sum(const std::vector<std::pair<float, float>>& terms, bool fused) {
  float sum = 0.0F;
  for (std::size_t t = 0; t < terms.size(); ++t) {
    const auto [weight, value] = terms[t];
    sum = t == 0 ? weight * value : fused ? std::fma(weight, value, sum) : sum + weight * value;
  }
  return sum;
}

void RowsContract::gather(const RowSizes& s, bool weighted) const {
  SCOPED_TRACE(text_of(s));
  const Places places(s);
  std::vector<Tensor> rows;
  std::vector<Tensor> row_scalars;
  for (int b = 0; b < s.buffers; ++b) {
    rows.push_back(
        Random(static_cast<std::uint64_t>(b + 10)).tensor({places.rows, s.hidden}, s.dtype));
    row_scalars.push_back(
        Random(static_cast<std::uint64_t>(b + 20)).tensor({places.rows}, Dtype::f32));
  }
  const Tensor weights = Random(6).tensor({s.count * s.width}, Dtype::f32);
  auto to = std::move(poisoned(1, {s.count, s.hidden + s.apart}, s.dtype)[0]);
  auto scalars = std::move(poisoned(1, {s.count * s.width}, Dtype::f32)[0]);
  OnDevice d;
  fill(d, s, places, rows, row_scalars);
  Tensor device_to = put(to);
  Tensor device_scalars = put(scalars);
  const Tensor device_weights = put(weights);
  backend_of(device).gather_rows({.from = d.table,
                                  .weights = weighted ? floats(device_weights) : nullptr,
                                  .to = cut(device_to, s.hidden),
                                  .scalar_bases = d.scalar_bases,
                                  .scalars = reinterpret_cast<float*>(device_scalars.data())});
  std::vector<std::pair<float, float>> terms;
  for (std::int64_t i = 0; i < s.count; ++i) {
    for (std::int64_t c = 0; c < s.hidden; ++c) {
      terms.clear();
      for (std::int64_t j = 0; j < s.width; ++j) {
        const auto at = static_cast<std::size_t>(i * s.width + j);
        const auto slot = places.slots.span<std::int32_t>()[at];
        const auto buffer = static_cast<std::size_t>(places.buffers.span<std::int32_t>()[at]);
        if (c == 0) {
          scalars.span<float>()[at] =
              slot < 0 ? 0.0F : row_scalars[buffer].span<float>()[static_cast<std::size_t>(slot)];
        }
        if (slot < 0) continue;
        terms.emplace_back(weighted ? weights.span<float>()[at] : 1.0F,
                           value_at(rows[buffer], slot, c));
      }
      set_at(to, i, c, expected_sum(terms, fused()));
    }
  }
  EXPECT_TRUE(same_bits(get(device_to), to));
  EXPECT_TRUE(same_bits(get(device_scalars), scalars));
}

TEST_P(RowsContract, GatherAddsInOrderAndRoundsOnce) {
  for (const RowSizes& s : many_sizes()) {
    gather(s, false);
    gather(s, true);
  }
}

void RowsContract::dot(const RowSizes& s) const {
  SCOPED_TRACE(text_of(s));
  const Places places(s);
  std::vector<Tensor> rows;
  for (int b = 0; b < s.buffers; ++b) {
    rows.push_back(
        Random(static_cast<std::uint64_t>(b + 10)).tensor({places.rows, s.hidden}, s.dtype));
  }
  const Tensor with = Random(7).tensor({s.count, s.hidden + s.apart}, s.dtype);
  auto poison_dots = poisoned(1, {s.count * s.width}, Dtype::f32);
  OnDevice d;
  fill(d, s, places, rows, {});
  Tensor device_with = put(with);
  Tensor device_dots = put(poison_dots[0]);
  backend_of(device).dot_rows({.with = cut(device_with, s.hidden),
                               .rows = d.table,
                               .dots = reinterpret_cast<float*>(device_dots.data())});
  const Tensor dots = get(device_dots);
  for (std::int64_t entry = 0; entry < s.count * s.width; ++entry) {
    const auto at = static_cast<std::size_t>(entry);
    const auto slot = places.slots.span<std::int32_t>()[at];
    const auto buffer = static_cast<std::size_t>(places.buffers.span<std::int32_t>()[at]);
    double expected = 0.0;
    double size = 0.0;
    for (std::int64_t c = 0; slot >= 0 && c < s.hidden; ++c) {
      const double term =
          static_cast<double>(value_at(with, entry / s.width, c)) * value_at(rows[buffer], slot, c);
      expected += term;
      size += std::abs(term);
    }
    EXPECT_NEAR(dots.span<float>()[at], expected, 1e-6 * size) << "entry " << entry;
  }
}

TEST_P(RowsContract, DotOfEveryEntry) {
  for (const RowSizes& s : many_sizes()) dot(s);
}

// The same rows at an address that allows wide loads and at one that does not.
TEST_P(RowsContract, DotsDoNotDependOnAlignmentOrNeighbours) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const std::int64_t hidden = 1096;
    const Tensor row = Random(1).tensor({1, hidden}, dtype);
    const Tensor with = Random(2).tensor({1, hidden}, dtype);
    std::vector<float> dots;
    for (const std::int64_t shift : {0, 1}) {
      Tensor moved = Tensor::zeros({1, hidden + shift}, dtype);
      for (std::int64_t c = 0; c < hidden; ++c) set_at(moved, 0, c + shift, value_at(row, 0, c));
      Tensor device_row = put(moved);
      const Tensor device_with = put(with);
      const Tensor slots = put(Tensor::from<std::int32_t>({3}, {-1, 0, 0}));
      Tensor device_dots = device.empty({3}, Dtype::f32);
      const std::vector<std::byte*> bases{device_row.data() + shift * size_of(dtype)};
      backend_of(device).dot_rows(
          {device_with,
           {1, 3, reinterpret_cast<const std::int32_t*>(slots.data()), nullptr, bases},
           reinterpret_cast<float*>(device_dots.data())});
      const Tensor result = get(device_dots);
      EXPECT_EQ(result.span<float>()[0], 0.0F);
      EXPECT_EQ(result.span<float>()[1], result.span<float>()[2]);
      dots.push_back(result.span<float>()[1]);
    }
    EXPECT_EQ(dots[0], dots[1]);
  }
}

TEST_P(RowsContract, GatherKeepsMinusZeroAndGivesZeroForNoRows) {
  const Tensor rows = put(Tensor::from<float>({2, 4}, {-0.0F, 1, -0.0F, 2, -0.0F, 0, 3, 4}));
  const Tensor slots = put(Tensor::from<std::int32_t>({6}, {-1, 0, 0, 1, -1, -1}));
  Tensor to = put(Tensor::from<float>({3, 4}, std::vector<float>(12, 7.0F)));
  const std::vector<std::byte*> bases{const_cast<std::byte*>(rows.data())};
  backend_of(device).gather_rows(
      {.from = {3, 2, reinterpret_cast<const std::int32_t*>(slots.data()), nullptr, bases},
       .to = to});
  EXPECT_TRUE(same_bits(get(to), Tensor::from<float>({3, 4}, {-0.0F, 1, -0.0F, 2,  //
                                                              -0.0F, 1, 3, 6, 0, 0, 0, 0})));
}

// Groups with many pads, none and nothing but pads; rows beyond the last group keep what they have.
TEST_P(RowsContract, PadsBecomeZeroInTheSamePass) {
  const std::vector<std::int32_t> row_offsets{0, 70, 72, 72, 100, 102};
  const std::vector<std::int32_t> group_rows{3, 2, 0, 0, 1};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const std::int64_t hidden : {1, 33, 72, 2048}) {
      for (const std::int64_t count : {0, 3}) {
        SCOPED_TRACE(std::to_string(count) + " rows of " + std::to_string(hidden));
        Tensor rows = std::move(poisoned(1, {105, hidden}, dtype)[0]);
        Tensor row_scalars = std::move(poisoned(1, {105}, Dtype::f32)[0]);
        Tensor device_rows = put(rows);
        Tensor device_scalars = put(row_scalars);
        const Tensor from = Random(8).tensor({count, hidden}, dtype);
        const Tensor scalars = Random(9).tensor({count * 2}, Dtype::f32);
        const std::vector<std::int32_t> slots{0, 100, 70, 1, 2, 71};
        const Tensor device_from = put(from);
        const Tensor device_own = put(scalars);
        const Tensor device_slots = put(Tensor::from<std::int32_t>({6}, slots));
        const std::vector<std::byte*> bases{device_rows.data()};
        const std::vector<std::byte*> scalar_bases{device_scalars.data()};
        backend_of(device).scatter_rows(
            {.from = device_from,
             .to = {count, 2, reinterpret_cast<const std::int32_t*>(device_slots.data()), nullptr,
                    bases},
             .scalars = floats(device_own),
             .scalar_bases = scalar_bases,
             .pads = PadRows{.rows = device_rows,
                             .scalars = device_scalars.view(),
                             .row_offsets = put(Tensor::from<std::int32_t>({6}, row_offsets)),
                             .group_rows = put(Tensor::from<std::int32_t>({5}, group_rows))}});
        for (std::size_t g = 0; g < group_rows.size(); ++g) {
          for (auto r = row_offsets[g] + group_rows[g]; r < row_offsets[g + 1]; ++r) {
            row_scalars.span<float>()[static_cast<std::size_t>(r)] = 0.0F;
            for (std::int64_t c = 0; c < hidden; ++c) set_at(rows, r, c, 0.0F);
          }
        }
        for (std::int64_t entry = 0; entry < count * 2; ++entry) {
          const auto slot = slots[static_cast<std::size_t>(entry)];
          row_scalars.span<float>()[static_cast<std::size_t>(slot)] =
              scalars.span<float>()[static_cast<std::size_t>(entry)];
          for (std::int64_t c = 0; c < hidden; ++c) {
            set_at(rows, slot, c, value_at(from, entry / 2, c));
          }
        }
        EXPECT_TRUE(same_bits(get(device_rows), rows));
        EXPECT_TRUE(same_bits(get(device_scalars), row_scalars));
      }
    }
  }
}

TEST_P(RowsContract, TakesAnyNumberOfBuffers) {
  constexpr std::int32_t kBuffers = 300;
  Tensor rows = device.empty({kBuffers, 4}, Dtype::f32);
  std::vector<std::byte*> bases;
  for (std::int64_t b = 0; b < kBuffers; ++b) bases.push_back(rows.view().row(b));
  const Tensor slots = put(Tensor::zeros({kBuffers}, Dtype::i32));
  Tensor numbers({kBuffers}, Dtype::i32);
  std::iota(numbers.span<std::int32_t>().begin(), numbers.span<std::int32_t>().end(), 0);
  const Tensor buffers = put(numbers);
  const RowTable table{kBuffers, 1, reinterpret_cast<const std::int32_t*>(slots.data()),
                       reinterpret_cast<const std::int32_t*>(buffers.data()), bases};
  const Tensor x = Random(1).tensor({kBuffers, 4}, Dtype::f32);
  const Tensor from = put(x);
  backend_of(device).scatter_rows({.from = from, .to = table});
  EXPECT_TRUE(same_bits(get(rows), x));
  Tensor back = device.empty(x.shape(), Dtype::f32);
  backend_of(device).gather_rows({.from = table, .to = back});
  EXPECT_TRUE(same_bits(get(back), x));
}

}  // namespace
}  // namespace switchyard::testing::rows_contract_test
