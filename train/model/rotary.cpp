// SPDX-License-Identifier: Apache-2.0
#include "model/rotary.h"

#include <cmath>
#include <complex>

#include "model/row_math.h"

namespace switchyard::train {

Rotary::Rotary(const SequenceShard& shard, std::int64_t head_size, float base)
    : count_(shard.count()),
      half_(head_size / 2),
      cosines_(static_cast<std::size_t>(count_ * half_)),
      sines_(static_cast<std::size_t>(count_ * half_)) {
  for (std::int64_t i = 0; i < half_; ++i) {
    const double angle = std::pow(static_cast<double>(base),
                                  -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
    const auto step = std::polar(1.0, angle);
    std::complex<double> turned = 1.0;
    // Starts at position 0 wherever the shard begins. Products are cheaper than sines, and as
    // exact.
    for (std::int64_t p = 0; p < shard.offset() + count_; ++p, turned *= step) {
      if (p < shard.offset()) continue;
      const auto at = static_cast<std::size_t>((p - shard.offset()) * half_ + i);
      cosines_[at] = static_cast<float>(turned.real());
      sines_[at] = static_cast<float>(turned.imag());
    }
  }
}

void Rotary::turn(Compute& compute, const TensorView& x, Turn direction) const {
  const auto heads = half_ == 0 ? 0 : x.shape()[1] / (2 * half_);
  const float sign = direction == Turn::forward ? 1.0F : -1.0F;
  compute.for_each(x.rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto t = first; t < last; ++t) {
      const float* cosines = cosines_.data() + t % count_ * half_;
      const float* sines = sines_.data() + t % count_ * half_;
      for (std::int64_t head = 0; head < heads; ++head) {
        float* low = row_of(x, t) + head * 2 * half_;
        float* high = low + half_;
        for (std::int64_t i = 0; i < half_; ++i) {
          const float a = low[i];
          const float b = high[i];
          const float sine = sign * sines[i];
          low[i] = a * cosines[i] - b * sine;
          high[i] = b * cosines[i] + a * sine;
        }
      }
    }
  });
}

}  // namespace switchyard::train
