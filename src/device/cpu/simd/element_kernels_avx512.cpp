// SPDX-License-Identifier: Apache-2.0
// The element kernels for CPUs with avx512.
#define SWITCHYARD_ISA avx512
#include "device/cpu/simd/element_kernels.inl"
