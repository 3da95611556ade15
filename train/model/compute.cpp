// SPDX-License-Identifier: Apache-2.0
#include "model/compute.h"

#include <chrono>

namespace switchyard::train {

void Compute::multiply(std::span<const Matmul> products) {
  const auto begin = std::chrono::steady_clock::now();
  matmul(device_, products);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  product_seconds_ += took.count();
}

}  // namespace switchyard::train
