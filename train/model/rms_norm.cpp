// SPDX-License-Identifier: Apache-2.0
#include "model/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "model/row_math.h"

namespace switchyard::train {
namespace {

constexpr float kEpsilon = 1e-5F;  // added to the mean square: a row of zeros stays zero

void d_x_of_row(const RmsNormBackward& args, std::int64_t t) {
  const auto hidden = args.x.shape()[1];
  const float* x = row_of(args.x, t);
  const float* weight = row_of(args.weight, 0);
  const float* d_y = row_of(args.d_y, t);
  float* d_x = row_of(args.d_x, t);
  const float inverse_rms = *row_of(args.inverse_rms, t);
  const float along = dot_of(d_y, weight, x, hidden);
  const float back = inverse_rms * inverse_rms * inverse_rms * along / static_cast<float>(hidden);
  for (std::int64_t h = 0; h < hidden; ++h) {
    d_x[h] += inverse_rms * d_y[h] * weight[h] - back * x[h];
  }
}

}  // namespace

void rms_norm(Compute& compute, const RmsNormForward& args) {
  const auto hidden = args.x.shape()[1];
  const float* weight = row_of(args.weight, 0);
  compute.for_each(args.x.rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto t = first; t < last; ++t) {
      const float* x = row_of(args.x, t);
      float* y = row_of(args.y, t);
      const float mean_square = dot_of(x, x, hidden) / static_cast<float>(hidden);
      const float inverse_rms = 1.0F / std::sqrt(mean_square + kEpsilon);
      *row_of(args.inverse_rms, t) = inverse_rms;
      for (std::int64_t h = 0; h < hidden; ++h) y[h] = x[h] * inverse_rms * weight[h];
    }
  });
}

void rms_norm_backward(Compute& compute, const RmsNormBackward& args) {
  compute.for_each(args.x.rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto t = first; t < last; ++t) d_x_of_row(args, t);
  });
  // Split by columns, so that each is summed in token order.
  compute.for_each(args.x.shape()[1], [&](std::int64_t first, std::int64_t last) {
    float* d_weight = row_of(args.d_weight, 0);
    std::fill(d_weight + first, d_weight + last, 0.0F);
    for (std::int64_t t = 0; t < args.x.rows(); ++t) {
      const float* x = row_of(args.x, t);
      const float* d_y = row_of(args.d_y, t);
      const float inverse_rms = *row_of(args.inverse_rms, t);
      for (auto h = first; h < last; ++h) d_weight[h] += d_y[h] * x[h] * inverse_rms;
    }
  });
}

}  // namespace switchyard::train
