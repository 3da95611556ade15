// SPDX-License-Identifier: Apache-2.0
// The element kernels for any CPU.
#define SWITCHYARD_ISA baseline
#include "device/cpu/simd/element_kernels.inl"
