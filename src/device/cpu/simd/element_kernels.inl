// SPDX-License-Identifier: Apache-2.0
// The element kernels, compiled once for each instruction set (SWITCHYARD_ISA). Like the row
// kernels, they use no library code.
#include "device/cpu/simd/activations.inl"
#include "device/cpu/simd/element_kernels.h"
#include "device/cpu/simd/lines.inl"

namespace switchyard::cpu {
namespace {

// Calls body(first element, count) for each whole line and then for the rest of the row.
template <typename Type, typename Body>
inline void for_each_line(std::int64_t elements, Body body) {
  std::int64_t i = 0;
  for (; i + Line<Type>::kElements <= elements; i += Line<Type>::kElements) {
    body(i, Line<Type>::kElements);
  }
  if (i < elements) body(i, elements - i);
}

template <typename Type>
inline Line<Type> load_part(const std::byte* row, std::int64_t first, std::int64_t count) {
  const std::byte* from = row + first * Type::kBytes;
  return count == Line<Type>::kElements ? load(Type{}, from) : load_tail(Type{}, from, count);
}

template <typename Type>
inline void store_part(std::byte* row, std::int64_t first, std::int64_t count,
                       const Line<Type>& line) {
  std::byte* to = row + first * Type::kBytes;
  if (count == Line<Type>::kElements) {
    store(Type{}, to, line, Stores::cached);
  } else {
    store_tail(Type{}, to, line, count);
  }
}

// Loads `count` floats, at most as many as a line of Type has elements. Pads with zeros.
template <typename Type>
inline Line<Type> load_floats(const float* row, std::int64_t first, std::int64_t count) {
  Line<Type> line;
  const auto* from = reinterpret_cast<const std::byte*>(row + first);
  std::byte padded[Line<Type>::kElements * 4] = {};
  if (count != Line<Type>::kElements) {
    __builtin_memcpy(padded, from, static_cast<std::size_t>(count * 4));
    from = padded;
  }
  for (int v = 0; v < Line<Type>::kVectors; ++v) {
    line.vectors[v] = load_raw<Floats>(from + v * kLanes * 4);
  }
  return line;
}

template <typename Type>
inline void store_floats(float* row, std::int64_t first, std::int64_t count,
                         const Line<Type>& line) {
  __builtin_memcpy(row + first, line.vectors, static_cast<std::size_t>(count * 4));
}

void widen(float* to, const std::byte* from, std::int64_t elements) {
  for_each_line<Bf16>(elements, [=](std::int64_t i, std::int64_t count) {
    store_floats<Bf16>(to, i, count, load_part<Bf16>(from, i, count));
  });
}

void narrow(std::byte* to, const float* from, std::int64_t elements) {
  for_each_line<Bf16>(elements, [=](std::int64_t i, std::int64_t count) {
    store_part<Bf16>(to, i, count, load_floats<Bf16>(from, i, count));
  });
}

template <typename Type>
void add(std::byte* to, const float* from, std::int64_t elements) {
  for_each_line<Type>(elements, [=](std::int64_t i, std::int64_t count) {
    store_part<Type>(to, i, count,
                     load_part<Type>(to, i, count) + load_floats<Type>(from, i, count));
  });
}

template <typename Type>
void add_rows(float* to, const std::byte* rows, std::int64_t num_rows, std::int64_t stride,
              std::int64_t elements, const float* scale) {
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const std::byte* row = rows + r * stride * Type::kBytes;
    const float factor = scale != nullptr ? scale[r] : 1.0F;
    for_each_line<Type>(elements, [=](std::int64_t i, std::int64_t count) {
      store_floats<Type>(to, i, count,
                         load_floats<Type>(to, i, count) + factor * load_part<Type>(row, i, count));
    });
  }
}

template <typename Type, typename Act>
void activation(const ActivationRow& row) {
  const std::byte* up_row = row.inner + (Act::kGated ? row.width * Type::kBytes : 0);
  for_each_line<Type>(row.width, [&](std::int64_t i, std::int64_t count) {
    Line<Type> up = load_part<Type>(up_row, i, count);
    const Line<Type> gate = Act::kGated ? load_part<Type>(row.inner, i, count) : up;
    for (int v = 0; v < Line<Type>::kVectors; ++v) {
      up.vectors[v] = row.weight * Act::value(gate.vectors[v], up.vectors[v], row.constants);
    }
    store_part<Type>(row.out, i, count, up);
  });
}

template <typename Type, typename Act>
float activation_gradient(const ActivationGradientRow& row) {
  std::byte* const up_row = row.inner + (Act::kGated ? row.width * Type::kBytes : 0);
  Floats sums[kSumVectors] = {};
  for_each_line<Type>(row.width, [&](std::int64_t i, std::int64_t count) {
    Line<Type> up = load_part<Type>(up_row, i, count);
    Line<Type> gate = Act::kGated ? load_part<Type>(row.inner, i, count) : up;
    const Line<Type> d_out = load_floats<Type>(row.d_out, i, count);
    Line<Type> out;
    for (int v = 0; v < Line<Type>::kVectors; ++v) {
      const auto d = Act::derivatives(gate.vectors[v], up.vectors[v], row.constants);
      sums[v % kSumVectors] = sums[v % kSumVectors] + d_out.vectors[v] * d.value;
      out.vectors[v] = row.weight * d.value;
      const Floats d_value = row.weight * d_out.vectors[v];
      gate.vectors[v] = d_value * d.d_gate;
      up.vectors[v] = d_value * d.d_up;
    }
    store_part<Type>(row.out, i, count, out);
    store_part<Type>(up_row, i, count, up);
    if (Act::kGated) store_part<Type>(row.inner, i, count, gate);
  });
  return add_pairwise(sums);
}

// Loads `count` values into the first lanes and `rest` into the others.
inline Floats load_lanes(const float* from, std::int64_t count, float rest) {
  if (count >= kLanes) return load_raw<Floats>(reinterpret_cast<const std::byte*>(from));
  float lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = j < count ? from[j] : rest;
  return load_raw<Floats>(reinterpret_cast<const std::byte*>(lanes));
}

inline void store_lanes(float* to, std::int64_t count, Floats value) {
  const auto stored = count < kLanes ? count : kLanes;
  __builtin_memcpy(to, &value, static_cast<std::size_t>(stored * 4));
}

float largest(const float* values, std::int64_t n) {
  Floats most = all(-__builtin_inff());
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats x = load_lanes(values + i, n - i, -__builtin_inff());
    most = x > most ? x : most;
  }
  float result = most[0];
  for (int j = 1; j < kLanes; ++j) result = most[j] > result ? most[j] : result;
  return result;
}

void softmax(float* values, std::int64_t n) {
  const float most = largest(values, n);
  Floats sums[kSumVectors] = {};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    Floats e = exp_of(load_lanes(values + i, n - i, most) - most);
    store_lanes(values + i, n - i, e);
    e = load_lanes(values + i, n - i, 0.0F);
    sums[(i / kLanes) % kSumVectors] = sums[(i / kLanes) % kSumVectors] + e;
  }
  const float total = add_pairwise(sums);
  for (std::int64_t i = 0; i < n; ++i) values[i] = values[i] / total;
}

void sigmoid(float* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    store_lanes(values + i, n - i, sigmoid_of(load_lanes(values + i, n - i, 0.0F)));
  }
}

bool all_finite(const float* values, std::int64_t n) {
  Ints bad = {};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const auto bits = reinterpret_cast<Ints>(load_lanes(values + i, n - i, 0.0F));
    bad = bad | ((bits & 0x7f800000) == 0x7f800000);
  }
  int any = 0;
  for (int j = 0; j < kLanes; ++j) any |= bad[j];
  return any == 0;
}

std::int64_t argmax(const float* values, std::int64_t n) {
  const float most = largest(values, n);
  std::int64_t i = 0;
  while (i < n - 1 && values[i] != most) ++i;
  return i;
}

// In the order of enum Activation.
template <typename Type, typename... Acts>
constexpr ElementKernels::Typed typed_with() {
  static_assert(sizeof...(Acts) == kNumActivations);
  return {
      add<Type>, add_rows<Type>, {activation<Type, Acts>...}, {activation_gradient<Type, Acts>...}};
}
template <typename Type>
constexpr ElementKernels::Typed typed() {
  return typed_with<Type, Swiglu, ClampedSwiglu, LimitedSwiglu, Geglu, GegluTanh, Reglu, Gelu,
                    GeluTanh, Relu, Relu2, Silu>();
}

}  // namespace

const ElementKernels SWITCHYARD_JOIN(kElementKernels_, SWITCHYARD_ISA) = {
    SWITCHYARD_TEXT(SWITCHYARD_ISA),
    widen,
    narrow,
    softmax,
    sigmoid,
    all_finite,
    argmax,
    typed<F32>(),
    typed<Bf16>(),
};

}  // namespace switchyard::cpu
