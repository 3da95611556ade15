#include "model/compute.h"

#include <chrono>

namespace switchyard::train {

void Compute::multiply(std::span<const Matmul> products) {
  const auto begin = std::chrono::steady_clock::now();
  matmul(device_, products);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  product_seconds_ += took.count();
  for (const Matmul& p : products) {
    const auto depth = p.a.shape()[p.a_layout == MatrixLayout::plain ? 1 : 0];
    product_operations_ +=
        2.0 * static_cast<double>(p.c.shape().num_elements()) * static_cast<double>(depth);
  }
}

}  // namespace switchyard::train
