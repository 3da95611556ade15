// SPDX-License-Identifier: Apache-2.0
// The row kernels for any CPU.
#define SWITCHYARD_ISA baseline
#include "device/cpu/simd/row_kernels.inl"
