// SPDX-License-Identifier: Apache-2.0
// Built-in variables, warp and block functions and atomics, which nvcc declares by itself.
// Included first in every translated source.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/launch.h"
#include "emulation/machine.h"
#include "emulation/ptx.h"

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1

using std::isfinite;

namespace emulation {

inline const Index& threadIdx() { return self().index; }
inline const Index& blockIdx() { return self().block->index; }
inline const Index& blockDim() { return self().block->machine->launch.block; }
inline const Index& gridDim() { return self().block->machine->launch.grid; }

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(dynamic_memory());
}
template <typename T, typename Tag>
T& static_shared() {
  static const char tag = 0;
  return *reinterpret_cast<T*>(static_variable(&tag, sizeof(T)));
}

// The lanes of `mask` exchange values: every one gets choose(values by lane, its lane). Lanes that
// are not there have a null pointer.
template <typename Value, typename Choose>
auto exchange(unsigned mask, Value value, const Choose& choose) {
  struct Lane {
    const Value* value;
    std::invoke_result_t<Choose, const Value* const*, int> result;
  } mine{&value, {}};
  meet_lanes(mask, &mine, [&](void** lanes) {
    const Value* values[kWarpLanes];
    for (int i = 0; i < kWarpLanes; ++i) {
      values[i] = lanes[i] == nullptr ? nullptr : static_cast<const Lane*>(lanes[i])->value;
    }
    for (int i = 0; i < kWarpLanes; ++i) {
      if (lanes[i] != nullptr) static_cast<Lane*>(lanes[i])->result = choose(values, i);
    }
  });
  return mine.result;
}

template <typename Value>
const Value& of_lane(const Value* const* values, int lane) {
  if (lane >= kWarpLanes || values[lane] == nullptr) fail("a value of a lane that is not there");
  return *values[lane];
}

}  // namespace emulation

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  // Every lane may name another source, so that the sources travel too.
  struct Asked {
    T value;
    int source;
  };
  return emulation::exchange(
      mask, Asked{value, source}, [width](const Asked* const* all, int lane) {
        const int from = lane / width * width + (all[lane]->source & (width - 1));
        return emulation::of_lane(all, from).value;
      });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emulation::exchange(mask, value, [distance](const T* const* all, int lane) {
    return emulation::of_lane(all, lane ^ distance);
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  return emulation::exchange(mask, value, [distance](const T* const* all, int lane) {
    const int from = lane - static_cast<int>(distance);
    return from < 0 ? *all[lane] : emulation::of_lane(all, from);
  });
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return emulation::exchange(mask, value, [](const T* const* all, int lane) {
    unsigned equal = 0;
    for (int i = 0; i < 32; ++i)
      equal |= (all[i] != nullptr && *all[i] == *all[lane] ? 1U : 0U) << i;
    return equal;
  });
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  return emulation::exchange(mask, vote, [](const int* const* all, int) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= (all[i] != nullptr && *all[i] != 0 ? 1U : 0U) << i;
    return votes;
  });
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) {
  return emulation::exchange(mask, vote, [](const int* const* all, int) {
    for (int i = 0; i < 32; ++i) {
      if (all[i] != nullptr && *all[i] == 0) return 0;
    }
    return 1;
  });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulation::exchange(mask, value, [](const T* const* all, int lane) {
    T least = *all[lane];
    for (int i = 0; i < 32; ++i) {
      if (all[i] != nullptr && *all[i] < least) least = *all[i];
    }
    return least;
  });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulation::exchange(mask, value, [](const T* const* all, int lane) {
    T most = *all[lane];
    for (int i = 0; i < 32; ++i) {
      if (all[i] != nullptr && *all[i] > most) most = *all[i];
    }
    return most;
  });
}
inline void __syncwarp(unsigned mask = ~0U) { __ballot_sync(mask, 1); }
inline void __syncthreads() { emulation::sync_block(0, 0); }
inline int __syncthreads_count(int vote) { return emulation::sync_block_and_count(vote != 0); }
inline int __syncthreads_or(int vote) { return __syncthreads_count(vote) != 0; }
inline int __syncthreads_and(int vote) { return __syncthreads_count(vote == 0) == 0; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
[[noreturn]] inline void __trap() { emulation::fail("the kernel traps"); }

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (value < old &&
         !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, const T& value) {
  *at = value;
}
inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  return emulation::shared_address_of(pointer);
}
inline std::size_t __cvta_generic_to_global(const void* pointer) {
  return reinterpret_cast<std::size_t>(pointer);
}

inline float __uint_as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t __float_as_uint(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
