// SPDX-License-Identifier: Apache-2.0
// Host code shared by the two products with fused activations.
#pragma once

#include "device/activation_constants.h"
#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/hopper/fits.h"

namespace switchyard::cuda::hopper {

// True if the activation has fused kernels. Other activations run as a separate pass.
inline bool activates(const ExpertsOptions& options) {
  return options.activation == Activation::swiglu ||
         options.activation == Activation::clamped_swiglu;
}

inline Activations activations_of(const ExpertsOptions& options, const Rows& inner,
                                  const Rows& activated, const RowNumbers<const float>& weights) {
  return {.inner = inner,
          .activated = activated,
          .weights = weights,
          .is_clamped = options.activation == Activation::clamped_swiglu,
          .constants = constants_of(options)};
}

}  // namespace switchyard::cuda::hopper
