// SPDX-License-Identifier: Apache-2.0
// The constants of ExpertsOptions that activations use.
#pragma once

namespace switchyard {

struct ActivationConstants {
  float limit = 0.0F;      // ExpertsOptions::clamp_limit
  float alpha = 0.0F;      // ExpertsOptions::gate_alpha
  float up_offset = 0.0F;  // ExpertsOptions::up_offset
};

// A template, so that this header needs no includes: kernels of every instruction set include it.
template <typename Options>
constexpr ActivationConstants constants_of(const Options& options) {
  return {options.clamp_limit, options.gate_alpha, options.up_offset};
}

}  // namespace switchyard
