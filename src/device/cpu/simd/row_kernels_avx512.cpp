// SPDX-License-Identifier: Apache-2.0
// The row kernels for CPUs with avx512.
#define SWITCHYARD_ISA avx512
#include "device/cpu/simd/row_kernels.inl"
