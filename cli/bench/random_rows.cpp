// SPDX-License-Identifier: Apache-2.0
#include "bench/random_rows.h"

#include <random>

namespace switchyard::cli {

Tensor random_rows(const Shape& shape, Dtype dtype, std::uint64_t seed) {
  std::minstd_rand random(static_cast<std::minstd_rand::result_type>(seed + 1));
  Tensor result(shape, dtype);
  const auto value = [&] { return static_cast<float>(random()) / 1073741824.0F - 1.0F; };
  if (dtype == Dtype::bf16) {
    for (auto& v : result.span<Bfloat16>()) v = to_bfloat16(value());
  } else {
    for (auto& v : result.span<float>()) v = value();
  }
  return result;
}

}  // namespace switchyard::cli
