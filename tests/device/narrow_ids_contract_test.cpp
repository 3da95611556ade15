// SPDX-License-Identifier: Apache-2.0
// Ids of callers on every device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/random.h"

namespace switchyard::narrow_ids_contract_test {
namespace {

using testing::Random;
using Ints = std::vector<std::int32_t>;
using Longs = std::vector<std::int64_t>;

class NarrowIdsContract : public testing::OnDevices {
 protected:
  // Narrows ids whose row stride is `apart` elements more than the row length.
  template <typename Id>
  Ints narrowed(const std::vector<Id>& ids, std::int64_t top_k,
                std::optional<std::int64_t> first_sentinel, std::int64_t apart = 0) const {
    const auto num_tokens = static_cast<std::int64_t>(ids.size()) / top_k;
    Tensor host = testing::poisoned({num_tokens, top_k + apart}, DtypeOf<Id>::value);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      std::memcpy(host.view().row(t), ids.data() + t * top_k,
                  static_cast<std::size_t>(top_k) * sizeof(Id));
    }
    Tensor rows = put(host);
    const ConstTensorView from = TensorView(rows.data(), DtypeOf<Id>::value, {num_tokens, top_k},
                                            top_k + apart, rows.view().owner(), rows.memory());
    Tensor to = put(testing::poisoned({num_tokens, top_k}, Dtype::i32));
    backend_of(device).narrow_ids({.from = from, .first_sentinel = first_sentinel, .to = to});
    const Tensor result = get(to);
    return {result.span<std::int32_t>().begin(), result.span<std::int32_t>().end()};
  }
};
SWITCHYARD_ON_DEVICES(NarrowIdsContract);

TEST_P(NarrowIdsContract, IdsStayWhatTheyAreAtEverySize) {
  for (const std::int64_t top_k : {1, 2, 8, 33}) {
    for (const std::int64_t num_tokens : {0, 1, 31, 1000, 70001}) {
      for (const std::int64_t apart : {0, 5}) {
        SCOPED_TRACE(::testing::Message() << num_tokens << " of " << top_k << " + " << apart);
        Random random(7);
        Ints ids(static_cast<std::size_t>(num_tokens * top_k));
        for (auto& id : ids) id = static_cast<std::int32_t>(random.below(300)) - 3;
        const Longs wide(ids.begin(), ids.end());
        EXPECT_TRUE(narrowed(wide, top_k, {}, apart) == ids);
        EXPECT_TRUE(narrowed(ids, top_k, {}, apart) == ids);
        std::ranges::replace_if(
            ids, [](std::int32_t id) { return id >= 128; }, -1);
        EXPECT_TRUE(narrowed(wide, top_k, 128, apart) == ids);
      }
    }
  }
}

// None of them becomes an expert, or −1, because its upper half is lost.
TEST_P(NarrowIdsContract, IdsBeyond32BitsStayOutOfRange) {
  constexpr std::int64_t kHalf = std::int64_t{1} << 32;
  using Limits32 = std::numeric_limits<std::int32_t>;
  using Limits64 = std::numeric_limits<std::int64_t>;
  const Longs ids{kHalf,
                  kHalf - 1,
                  -kHalf,
                  -kHalf - 1,
                  Limits64::max(),
                  Limits64::min(),
                  Limits32::max(),
                  Limits32::min(),
                  8,
                  7,
                  -1,
                  -2};
  constexpr std::int32_t kHigh = Limits32::max();
  constexpr std::int32_t kLow = Limits32::min();
  EXPECT_EQ(narrowed(ids, 3, {}),
            (Ints{kHigh, kHigh, kLow, kLow, kHigh, kLow, kHigh, kLow, 8, 7, -1, -2}));
  EXPECT_EQ(narrowed(ids, 3, 8), (Ints{-1, -1, kLow, kLow, -1, kLow, -1, kLow, -1, 7, -1, -2}));
}

TEST_P(NarrowIdsContract, SentinelsOf32BitsBecomeNone) {
  EXPECT_EQ(narrowed(Ints{0, 4, 5, -1, -7, 2'000'000'000}, 2, 4), (Ints{0, -1, -1, -1, -7, -1}));
}

}  // namespace
}  // namespace switchyard::narrow_ids_contract_test
