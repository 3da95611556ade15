// SPDX-License-Identifier: Apache-2.0
// Activations and their derivatives, on vectors. Part of element_kernels.inl.
#pragma once

#include <cfloat>

#include "device/activation_constants.h"
#include "device/cpu/simd/lines.inl"

namespace switchyard::cpu {
namespace {

inline Floats all(float value) { return Floats{} + value; }
inline Floats at_most(Floats x, float limit) { return x > limit ? all(limit) : x; }
inline Floats at_least(Floats x, float limit) { return x < limit ? all(limit) : x; }

// eˣ to within one or two units in the last place, from the smallest subnormal to infinity. NaN
// stays NaN.
inline Floats exp_of(Floats x) {
  x = at_least(at_most(x, 89.0F), -104.0F);
  constexpr float kToInteger = 12582912.0F;  // adding 1.5·2²³ rounds to an integer
  const Floats shifted = x * 1.44269504F + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  Floats p = all(1.0F / 5040.0F);
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  // 2ⁿ in two factors, since neither 2¹²⁸ nor 2⁻¹⁵⁰ is a float.
  const Ints exponent = reinterpret_cast<Ints>(shifted) - 0x4b400000;
  const Ints half = exponent >> 1;
  const auto power = [](Ints e) { return reinterpret_cast<Floats>((e + 127) << 23); };
  return p * power(half) * power(exponent - half);
}

inline Floats sigmoid_of(Floats x) { return 1.0F / (1.0F + exp_of(-x)); }

// The value of an activation and its derivatives.
struct Derivatives {
  Floats value;
  Floats d_gate;
  Floats d_up;
};

struct Swiglu {
  static constexpr bool kGated = true;
  static Floats value(Floats gate, Floats up, const ActivationConstants& /*c*/) {
    return gate * sigmoid_of(gate) * up;
  }
  static Derivatives derivatives(Floats gate, Floats up, const ActivationConstants& /*c*/) {
    const Floats s = sigmoid_of(gate);
    return {gate * s * up, up * (s * (1.0F + gate * (1.0F - s))), gate * s};
  }
};

inline Floats clamp(Floats x, float limit) { return at_least(at_most(x, limit), -limit); }
// The gradient through clamp(): passes where x is within the limits or at one of them.
inline Floats pass_clamp(Floats x, float limit, Floats gradient) {
  return ((x > limit) | (x < -limit)) ? Floats{} : gradient;
}

struct ClampedSwiglu {
  static constexpr bool kGated = true;
  static Floats value(Floats gate, Floats up, const ActivationConstants& c) {
    const Floats g = at_most(gate, c.limit);
    return g * sigmoid_of(c.alpha * g) * (clamp(up, c.limit) + c.up_offset);
  }
  static Derivatives derivatives(Floats gate, Floats up, const ActivationConstants& c) {
    const Floats g = at_most(gate, c.limit);
    const Floats u = clamp(up, c.limit) + c.up_offset;
    const Floats s = sigmoid_of(c.alpha * g);
    const Floats d_gate = u * (s * (1.0F + c.alpha * g * (1.0F - s)));
    return {g * s * u, gate > c.limit ? Floats{} : d_gate, pass_clamp(up, c.limit, g * s)};
  }
};

struct LimitedSwiglu {
  static constexpr bool kGated = true;
  static Floats value(Floats gate, Floats up, const ActivationConstants& c) {
    return at_most(gate * sigmoid_of(gate), c.limit) * clamp(up, c.limit);
  }
  static Derivatives derivatives(Floats gate, Floats up, const ActivationConstants& c) {
    const Floats s = sigmoid_of(gate);
    const Floats silu = gate * s;
    const Floats g = at_most(silu, c.limit);
    const Floats u = clamp(up, c.limit);
    const Floats d_gate = u * (s * (1.0F + gate * (1.0F - s)));
    return {g * u, silu > c.limit ? Floats{} : d_gate, pass_clamp(up, c.limit, g)};
  }
};

struct Gelu {
  static constexpr bool kGated = false;
  // Φ(u), by erfc(z) = e^(−z²) · t · Q(t), t = 1/(1 + 0.3z): Q fitted to 3e-8 for all z ≥ 0.
  static Floats normal_cdf(Floats u, Floats bell) {
    const Floats z = (u < 0.0F ? -u : u) * 0.707106781F;
    const Floats t = 1.0F / (1.0F + 0.3F * z);
    Floats q = all(-1.300560532e-01F);
    q = q * t + 4.883715781e-01F;
    q = q * t + -5.185858692e-01F;
    q = q * t + 5.555921355e-01F;
    q = q * t + -1.006068572e-01F;
    q = q * t + 2.177169603e-01F;
    q = q * t + 1.475500491e-01F;
    q = q * t + 1.708380860e-01F;
    q = q * t + 1.691799520e-01F;
    const Floats below = 0.5F * bell * t * q;
    return u < 0.0F ? below : 1.0F - below;
  }
  static Floats value(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    return u * normal_cdf(u, exp_of(-0.5F * u * u));
  }
  static Derivatives derivatives(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    const Floats bell = exp_of(-0.5F * u * u);
    const Floats cdf = normal_cdf(u, bell);
    return {u * cdf, Floats{}, cdf + u * bell * 0.398942280F};
  }
};

struct GeluTanh {
  static constexpr bool kGated = false;
  static constexpr float kTwiceFactor = 1.59576912F;  // 2·√(2/π)
  static constexpr float kCubic = 0.044715F;
  // ½(1 + tanh v) is the sigmoid of 2v.
  static Floats factor(Floats u) { return sigmoid_of(kTwiceFactor * (u + kCubic * u * u * u)); }
  static Floats value(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    return u * factor(u);
  }
  static Derivatives derivatives(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    const Floats s = factor(u);
    // Kept finite, because for large u it is multiplied by 0.
    const Floats slope = at_most(kTwiceFactor * (1.0F + 3.0F * kCubic * u * u), FLT_MAX);
    return {u * s, Floats{}, s + u * s * (1.0F - s) * slope};
  }
};

struct Relu {
  static constexpr bool kGated = false;
  static Floats value(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    return u < 0.0F ? Floats{} : u;  // NaN stays NaN
  }
  static Derivatives derivatives(Floats gate, Floats u, const ActivationConstants& c) {
    return {value(gate, u, c), Floats{}, u > 0.0F ? all(1.0F) : Floats{}};
  }
};

struct Relu2 {
  static constexpr bool kGated = false;
  static Floats value(Floats gate, Floats u, const ActivationConstants& c) {
    const Floats r = Relu::value(gate, u, c);
    return r * r;
  }
  static Derivatives derivatives(Floats gate, Floats u, const ActivationConstants& c) {
    const Floats r = Relu::value(gate, u, c);
    return {r * r, Floats{}, 2.0F * r};
  }
};

struct Silu {
  static constexpr bool kGated = false;
  static Floats value(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    return u * sigmoid_of(u);
  }
  static Derivatives derivatives(Floats /*gate*/, Floats u, const ActivationConstants& /*c*/) {
    const Floats s = sigmoid_of(u);
    return {u * s, Floats{}, s * (1.0F + u * (1.0F - s))};
  }
};

// Activation(gate) · up.
template <typename OfGate>
struct Gated {
  static constexpr bool kGated = true;
  static Floats value(Floats gate, Floats up, const ActivationConstants& c) {
    return OfGate::value(gate, gate, c) * up;
  }
  static Derivatives derivatives(Floats gate, Floats up, const ActivationConstants& c) {
    const Derivatives d = OfGate::derivatives(gate, gate, c);
    return {d.value * up, d.d_up * up, d.value};
  }
};
using Geglu = Gated<Gelu>;
using GegluTanh = Gated<GeluTanh>;
using Reglu = Gated<Relu>;

}  // namespace
}  // namespace switchyard::cpu
