// SPDX-License-Identifier: Apache-2.0
#include "support/random.h"

#include <algorithm>
#include <cmath>

namespace switchyard::testing {

std::uint64_t Random::next() {  // splitmix64
  state_ += 0x9e3779b97f4a7c15U;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

std::int64_t Random::below(std::int64_t bound) {
  return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
}

float Random::uniform() { return static_cast<float>(next() >> 40) / 8388608.0F - 1.0F; }

Tensor Random::tensor(const Shape& shape, Dtype dtype) {
  Tensor result(shape, dtype);
  if (dtype == Dtype::bf16) {
    for (auto& value : result.span<Bfloat16>()) value = to_bfloat16(uniform());
  } else {
    for (auto& value : result.span<float>()) value = uniform();
  }
  return result;
}

Tensor Random::expert_ids(const Picks& picks) {
  Tensor ids({picks.num_tokens, picks.top_k}, Dtype::i32);
  const auto out = ids.span<std::int32_t>();
  std::vector<std::int32_t> chosen;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i % static_cast<std::size_t>(picks.top_k) == 0) chosen.clear();
    out[i] = -1;
    const bool none = static_cast<double>(below(1000)) < picks.none * 1000.0;
    if (none || static_cast<int>(chosen.size()) == picks.num_experts) continue;
    const double u = static_cast<double>(below(1 << 20)) / (1 << 20);
    auto e = static_cast<std::int32_t>(std::pow(u, 1.0 + 6.0 * picks.skew) * picks.num_experts);
    while (std::ranges::find(chosen, e) != chosen.end()) e = (e + 1) % picks.num_experts;
    chosen.push_back(e);
    out[i] = e;
  }
  return ids;
}

std::vector<float> wide_range() {
  std::vector<float> values{0.0F, -0.0F, 1e-30F, -1e-30F, 88.0F, -88.0F, 100.0F, -100.0F};
  for (int i = -2000; i <= 2000; ++i) {
    const auto v = static_cast<float>(i) / 2000.0F;
    values.push_back(100.0F * v * v * v);
  }
  return values;
}

}  // namespace switchyard::testing
