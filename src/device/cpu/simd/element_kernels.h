// SPDX-License-Identifier: Apache-2.0
// Kernels for the elements of a row: activations, scores, conversions. One source is compiled for
// every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/activation_constants.h"

namespace switchyard::cpu {

constexpr int kNumActivations = 11;

// A row of an expert's inner values: `width` gates and then `width` ups, or only ups.
struct ActivationRow {
  const std::byte* inner = nullptr;
  std::byte* out = nullptr;  // weight · activation
  std::int64_t width = 0;
  float weight = 1.0F;
  ActivationConstants constants = {};
};

struct ActivationGradientRow {
  std::byte* inner = nullptr;    // becomes the gradient of inner
  const float* d_out = nullptr;  // the gradient of weight · activation
  std::byte* out = nullptr;      // weight · activation, as in forward
  std::int64_t width = 0;
  float weight = 1.0F;
  ActivationConstants constants = {};
};

struct ElementKernels {
  const char* name;

  void (*widen)(float* to, const std::byte* from, std::int64_t elements);   // bf16 to f32
  void (*narrow)(std::byte* to, const float* from, std::int64_t elements);  // f32 to bf16

  // Replace the values [n] of one token.
  void (*softmax)(float* values, std::int64_t n);
  void (*sigmoid)(float* values, std::int64_t n);
  bool (*all_finite)(const float* values, std::int64_t n);
  // Returns the index of the largest value, the lowest index of equal values.
  std::int64_t (*argmax)(const float* values, std::int64_t n);

  struct Typed {
    // to += from
    void (*add)(std::byte* to, const float* from, std::int64_t elements);
    // to += Σ_r scale[r] · row r, with rows `stride` elements apart. `scale` may be null.
    void (*add_rows)(float* to, const std::byte* rows, std::int64_t num_rows, std::int64_t stride,
                     std::int64_t elements, const float* scale);
    // Indexed by Activation.
    void (*activation[kNumActivations])(const ActivationRow& row);
    // Indexed by Activation. Returns ⟨d_out, activation⟩, the gradient of the weight.
    float (*activation_gradient[kNumActivations])(const ActivationGradientRow& row);
  };
  Typed f32;
  Typed bf16;
};

extern const ElementKernels kElementKernels_baseline;
extern const ElementKernels kElementKernels_avx2;
extern const ElementKernels kElementKernels_avx512;

// Returns the variants that this CPU can run, the best one last.
std::vector<const ElementKernels*> element_kernels_of_this_cpu();
// Returns the best variant for this CPU.
const ElementKernels& element_kernels();

}  // namespace switchyard::cpu
