// SPDX-License-Identifier: Apache-2.0
// A rank's device, and the time that its matrix products take.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "switchyard/device.h"
#include "switchyard/matmul.h"

namespace switchyard::train {

class Compute {
 public:
  explicit Compute(Device device) : device_(std::move(device)) {}

  const Device& device() const { return device_; }

  void multiply(const Matmul& product) { multiply({&product, 1}); }
  void multiply(std::span<const Matmul> products);
  // Calls piece(first, last) for parts of 0 … count − 1, on all threads.
  void for_each(std::int64_t count,
                const std::function<void(std::int64_t, std::int64_t)>& piece) const {
    device_.parallel_for(count, piece);
  }

  // Returns the time of all products so far.
  double product_seconds() const { return product_seconds_; }

 private:
  Device device_;
  double product_seconds_ = 0.0;
};

}  // namespace switchyard::train
