// SPDX-License-Identifier: Apache-2.0
// The activations and their derivatives, matching src/device/cpu/simd/activations.inl.
#pragma once

#include <cfloat>
#include <cmath>

#include "device/activation_constants.h"

namespace switchyard::cuda {

// bf16 has eight bits of precision, so fast approximations are enough. f32 uses AccurateMath.
struct FastMath {
  __device__ static float exp(float x) { return __expf(x); }
  // Flushing to zero is harmless: tiny powers vanish when added to 1, and tiny results may be 0.
  __device__ static float sigmoid(float x) {
    float power = -kLog2E * x;
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(power));
    float result = 1.0F + power;
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(result));
    return result;
  }
  // Replaces several numbers by their sigmoids, which hide each other's latency.
  template <int kCount>
  __device__ static void sigmoids(float (&x)[kCount]) {
#pragma unroll
    for (float& power : x) {
      power *= -kLog2E;
      asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(power));
    }
#pragma unroll
    for (float& result : x) {
      result += 1.0F;
      asm volatile("rcp.approx.ftz.f32 %0, %0;" : "+f"(result));
    }
  }

 private:
  static constexpr float kLog2E = 1.44269504F;
};
struct AccurateMath {
  __device__ static float exp(float x) { return expf(x); }
  __device__ static float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }
};

struct Derivatives {
  float value;
  float d_gate;
  float d_up;
};

// The two activations that products are fused with. Each is also given by the sigmoid `s` of
// sigmoid_input(), so that a caller may compute several sigmoids at once.
template <typename Math>
struct Swiglu {
  static constexpr bool kGated = true;
  __device__ static float sigmoid_input(float gate, const ActivationConstants& /*c*/) {
    return gate;
  }
  __device__ static float value_of(float s, float gate, float up,
                                   const ActivationConstants& /*c*/) {
    return gate * s * up;
  }
  __device__ static Derivatives derivatives_of(float s, float gate, float up,
                                               const ActivationConstants& /*c*/) {
    const float silu = gate * s;
    return {silu * up, up * (s + silu * (1.0F - s)), silu};
  }
  __device__ static float value(float gate, float up, const ActivationConstants& c) {
    return value_of(Math::sigmoid(gate), gate, up, c);
  }
  __device__ static Derivatives derivatives(float gate, float up, const ActivationConstants& c) {
    return derivatives_of(Math::sigmoid(gate), gate, up, c);
  }
};

// Comparisons instead of fminf, so that NaN stays NaN.
__device__ inline float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float clamp(float x, float limit) {
  return x < -limit ? -limit : at_most(x, limit);
}
// Returns `gradient` if x is within the limits of clamp() or at one of them, and 0 otherwise.
__device__ inline float pass_clamp(float x, float limit, float gradient) {
  return x > limit || x < -limit ? 0.0F : gradient;
}

template <typename Math>
struct ClampedSwiglu {
  static constexpr bool kGated = true;
  __device__ static float sigmoid_input(float gate, const ActivationConstants& c) {
    return c.alpha * at_most(gate, c.limit);
  }
  __device__ static float value_of(float s, float gate, float up, const ActivationConstants& c) {
    return at_most(gate, c.limit) * s * (clamp(up, c.limit) + c.up_offset);
  }
  __device__ static Derivatives derivatives_of(float s, float gate, float up,
                                               const ActivationConstants& c) {
    const float g = at_most(gate, c.limit);
    const float u = clamp(up, c.limit) + c.up_offset;
    const float d_gate = u * (s * (1.0F + c.alpha * g * (1.0F - s)));
    return {g * s * u, gate > c.limit ? 0.0F : d_gate, pass_clamp(up, c.limit, g * s)};
  }
  __device__ static float value(float gate, float up, const ActivationConstants& c) {
    return value_of(Math::sigmoid(sigmoid_input(gate, c)), gate, up, c);
  }
  __device__ static Derivatives derivatives(float gate, float up, const ActivationConstants& c) {
    return derivatives_of(Math::sigmoid(sigmoid_input(gate, c)), gate, up, c);
  }
};

template <typename Math>
struct LimitedSwiglu {
  static constexpr bool kGated = true;
  __device__ static float value(float gate, float up, const ActivationConstants& c) {
    return at_most(gate * Math::sigmoid(gate), c.limit) * clamp(up, c.limit);
  }
  __device__ static Derivatives derivatives(float gate, float up, const ActivationConstants& c) {
    const float s = Math::sigmoid(gate);
    const float silu = gate * s;
    const float g = at_most(silu, c.limit);
    const float u = clamp(up, c.limit);
    return {g * u, silu > c.limit ? 0.0F : u * (s + silu * (1.0F - s)), pass_clamp(up, c.limit, g)};
  }
};

template <typename Math>
struct Gelu {
  static constexpr bool kGated = false;
  // Uses erfc, which is also accurate in the tail.
  __device__ static float normal_cdf(float u) { return 0.5F * erfcf(-0.707106781F * u); }
  __device__ static float value(float /*gate*/, float u, const ActivationConstants& /*c*/) {
    return u * normal_cdf(u);
  }
  __device__ static Derivatives derivatives(float /*gate*/, float u,
                                            const ActivationConstants& /*c*/) {
    const float cdf = normal_cdf(u);
    return {u * cdf, 0.0F, cdf + u * Math::exp(-0.5F * u * u) * 0.398942280F};
  }
};

template <typename Math>
struct GeluTanh {
  static constexpr bool kGated = false;
  static constexpr float kTwiceFactor = 1.59576912F;  // 2·√(2/π)
  static constexpr float kCubic = 0.044715F;
  // ½(1 + tanh v) is the sigmoid of 2v.
  __device__ static float factor(float u) {
    return Math::sigmoid(kTwiceFactor * (u + kCubic * u * u * u));
  }
  __device__ static float value(float /*gate*/, float u, const ActivationConstants& /*c*/) {
    return u * factor(u);
  }
  __device__ static Derivatives derivatives(float /*gate*/, float u,
                                            const ActivationConstants& /*c*/) {
    const float s = factor(u);
    // Kept finite, since it is multiplied by 0 where |u| is large.
    const float slope = fminf(kTwiceFactor * (1.0F + 3.0F * kCubic * u * u), FLT_MAX);
    return {u * s, 0.0F, s + u * s * (1.0F - s) * slope};
  }
};

template <typename Math>
struct Relu {
  static constexpr bool kGated = false;
  __device__ static float value(float /*gate*/, float u, const ActivationConstants& /*c*/) {
    return u < 0.0F ? 0.0F : u;  // NaN stays NaN
  }
  __device__ static Derivatives derivatives(float gate, float u, const ActivationConstants& c) {
    return {value(gate, u, c), 0.0F, u > 0.0F ? 1.0F : 0.0F};
  }
};

template <typename Math>
struct Relu2 {
  static constexpr bool kGated = false;
  __device__ static float value(float gate, float u, const ActivationConstants& c) {
    const float r = Relu<Math>::value(gate, u, c);
    return r * r;
  }
  __device__ static Derivatives derivatives(float gate, float u, const ActivationConstants& c) {
    const float r = Relu<Math>::value(gate, u, c);
    return {r * r, 0.0F, 2.0F * r};
  }
};

template <typename Math>
struct Silu {
  static constexpr bool kGated = false;
  __device__ static float value(float /*gate*/, float u, const ActivationConstants& /*c*/) {
    return u * Math::sigmoid(u);
  }
  __device__ static Derivatives derivatives(float /*gate*/, float u,
                                            const ActivationConstants& /*c*/) {
    const float s = Math::sigmoid(u);
    return {u * s, 0.0F, s * (1.0F + u * (1.0F - s))};
  }
};

// The activation of the gate, times up.
template <typename OfGate>
struct Gated {
  static constexpr bool kGated = true;
  __device__ static float value(float gate, float up, const ActivationConstants& c) {
    return OfGate::value(gate, gate, c) * up;
  }
  __device__ static Derivatives derivatives(float gate, float up, const ActivationConstants& c) {
    const Derivatives d = OfGate::derivatives(gate, gate, c);
    return {d.value * up, d.d_up * up, d.value};
  }
};
template <typename Math>
using Geglu = Gated<Gelu<Math>>;
template <typename Math>
using GegluTanh = Gated<GeluTanh<Math>>;
template <typename Math>
using Reglu = Gated<Relu<Math>>;

}  // namespace switchyard::cuda
