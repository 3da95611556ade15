// SPDX-License-Identifier: Apache-2.0
// The element kernels for CPUs with avx2.
#define SWITCHYARD_ISA avx2
#include "device/cpu/simd/element_kernels.inl"
