// What the two products that activate have in common on the host.
#pragma once

#include "device/activation_constants.h"
#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/hopper/fits.h"

namespace switchyard::cuda::hopper {

// The activations that have such products. Others are a pass of their own.
inline bool activates(const ExpertsOptions& options) {
  return options.activation == Activation::swiglu ||
         options.activation == Activation::clamped_swiglu;
}

inline Activations activations_of(const ExpertsOptions& options, const Rows& inner,
                                  const Rows& activated, const RowNumbers<const float>& weights) {
  return {.inner = inner,
          .activated = activated,
          .weights = weights.data,
          .weight_sources = weights.sources,
          .is_clamped = options.activation == Activation::clamped_swiglu,
          .constants = constants_of(options)};
}

}  // namespace switchyard::cuda::hopper
