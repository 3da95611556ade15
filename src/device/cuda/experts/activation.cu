// SPDX-License-Identifier: Apache-2.0
// Kernels for the activations of the experts' inner rows and their gradients.
#include <cuda_runtime.h>

#include "device/activation_constants.h"
#include "device/cuda/experts/activations.cuh"
#include "device/cuda/experts/lines.cuh"
#include "device/cuda/experts/row_passes.h"
#include "device/cuda/experts/row_teams.cuh"

namespace switchyard::cuda {
namespace {

template <typename T>
struct ActivateKernel {
  Groups groups;
  Lines lines;  // lines of `activated`, and of each half of `inner`
  int warps;
  const T* inner;
  std::int64_t inner_stride;
  T* activated;
  std::int64_t activated_stride;
  const float* row_weights;
  ActivationConstants constants;
};

template <typename T, typename Act>
__global__ void __launch_bounds__(kTeamBlock) activate_kernel(const ActivateKernel<T> args) {
  constexpr int kAtOnce = 2;  // lines that a thread has in flight
  const Lines lines = args.lines;
  const int team = args.warps * 32;
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    const T* const gates = args.inner + row * args.inner_stride;
    const T* const ups = Act::kGated ? gates + lines.width : gates;
    T* const out = args.activated + row * args.activated_stride;
    const float weight = args.row_weights != nullptr ? args.row_weights[row] : 1.0F;
    for (int first = thread; first < lines.count; first += kAtOnce * team) {
      Line<T> gate[kAtOnce];
      Line<T> up[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int line = first + j * team;
        if (line >= lines.count) break;
        up[j] = lines.load(ups, line);
        if constexpr (Act::kGated) gate[j] = lines.load(gates, line);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int line = first + j * team;
        if (line >= lines.count) break;
        Line<T> result;
#pragma unroll
        for (int i = 0; i < Line<T>::kElements; ++i) {
          const float g = Act::kGated ? gate[j].get(i) : 0.0F;
          result.set(i, weight * Act::value(g, up[j].get(i), args.constants));
        }
        lines.store(out, line, result);
      }
    }
  });
}

template <typename T>
struct ActivateBackwardKernel {
  Groups groups;
  Lines lines;  // lines of `activated`, and of each half of `inner`
  int warps;
  T* inner;
  std::int64_t inner_stride;
  T* activated;
  std::int64_t activated_stride;
  const float* row_weights;
  ActivationConstants constants;
  float* d_row_weights;
};

// Computes the gradients of one line of a row. Returns its part of ⟨d_activated, activation⟩.
template <typename T, typename Act>
__device__ float line_backward(const Lines& lines, T* inner, T* activated, int line, float weight,
                               const ActivationConstants& constants) {
  T* const ups = Act::kGated ? inner + lines.width : inner;
  Line<T> out = lines.load(activated, line);
  Line<T> up = lines.load(ups, line);
  Line<T> gate = up;
  if constexpr (Act::kGated) gate = lines.load(inner, line);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < Line<T>::kElements; ++i) {
    const float d_value = out.get(i);
    const Derivatives d = Act::derivatives(gate.get(i), up.get(i), constants);
    sum += d_value * d.value;
    out.set(i, weight * d.value);
    gate.set(i, weight * d_value * d.d_gate);
    up.set(i, weight * d_value * d.d_up);
  }
  lines.store(activated, line, out);
  lines.store(ups, line, up);
  if constexpr (Act::kGated) lines.store(inner, line, gate);
  return sum;
}

template <typename T, typename Act>
__global__ void __launch_bounds__(kTeamBlock)
    activate_backward_kernel(const ActivateBackwardKernel<T> args) {
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    const float weight = args.row_weights != nullptr ? args.row_weights[row] : 1.0F;
    float sum = 0.0F;
    for (int line = thread; line < args.lines.count; line += args.warps * 32) {
      sum += line_backward<T, Act>(args.lines, args.inner + row * args.inner_stride,
                                   args.activated + row * args.activated_stride, line, weight,
                                   args.constants);
    }
    if (args.d_row_weights == nullptr) return;
    sum = team_sum(sum, args.warps);
    if (thread == 0) args.d_row_weights[row] = sum;
  });
}

// Calls launch(T{}, act), where `act` is the activation computed with `Math`.
template <typename T, typename Math, typename Launch>
void for_activation(Activation activation, Launch launch) {
  switch (activation) {
    case Activation::swiglu:
      return launch(T{}, Swiglu<Math>{});
    case Activation::clamped_swiglu:
      return launch(T{}, ClampedSwiglu<Math>{});
    case Activation::limited_swiglu:
      return launch(T{}, LimitedSwiglu<Math>{});
    case Activation::geglu:
      return launch(T{}, Geglu<Math>{});
    case Activation::geglu_tanh:
      return launch(T{}, GegluTanh<Math>{});
    case Activation::reglu:
      return launch(T{}, Reglu<Math>{});
    case Activation::gelu:
      return launch(T{}, Gelu<Math>{});
    case Activation::gelu_tanh:
      return launch(T{}, GeluTanh<Math>{});
    case Activation::relu:
      return launch(T{}, Relu<Math>{});
    case Activation::relu2:
      return launch(T{}, Relu2<Math>{});
    case Activation::silu:
      return launch(T{}, Silu<Math>{});
  }
}

template <typename Launch>
void for_options(const ExpertsOptions& options, Launch launch) {
  if (options.dtype == Dtype::bf16) {
    for_activation<__nv_bfloat16, FastMath>(options.activation, launch);
  } else {
    for_activation<float, AccurateMath>(options.activation, launch);
  }
}

}  // namespace

void activate(const Activate& args, Context& context) {
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return;
  for_options(args.options, [&]<typename T, typename Act>(T, Act) {
    const Lines lines = lines_of<T>(args.options.intermediate, args.inner, args.activated);
    const int warps = team_warps(lines.count);
    const ActivateKernel<T> kernel{.groups = args.groups,
                                   .lines = lines,
                                   .warps = warps,
                                   .inner = data_of<T>(args.inner),
                                   .inner_stride = args.inner.stride,
                                   .activated = data_of<T>(args.activated),
                                   .activated_stride = args.activated.stride,
                                   .row_weights = args.row_weights,
                                   .constants = constants_of(args.options)};
    activate_kernel<T, Act>
        <<<team_blocks(args.groups, warps, context), kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "activate");
  });
}

void activate_backward(const ActivateBackward& args, Context& context) {
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return;
  for_options(args.options, [&]<typename T, typename Act>(T, Act) {
    const Lines lines = lines_of<T>(args.options.intermediate, args.inner, args.activated);
    const int warps = team_warps(lines.count);
    const ActivateBackwardKernel<T> kernel{.groups = args.groups,
                                           .lines = lines,
                                           .warps = warps,
                                           .inner = data_of<T>(args.inner),
                                           .inner_stride = args.inner.stride,
                                           .activated = data_of<T>(args.activated),
                                           .activated_stride = args.activated.stride,
                                           .row_weights = args.row_weights,
                                           .constants = constants_of(args.options),
                                           .d_row_weights = args.d_row_weights};
    activate_backward_kernel<T, Act>
        <<<team_blocks(args.groups, warps, context), kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "activate_backward");
  });
}

}  // namespace switchyard::cuda
