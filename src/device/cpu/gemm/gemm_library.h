// SPDX-License-Identifier: Apache-2.0
// The interface to a library of matrix products. Either gemm_onednn.cpp or gemm_plain.cpp is built.
#pragma once

#include "device/cpu/gemm/gemm.h"

namespace switchyard::cpu {

// All matrices are f32.
void gemm_f32(const Gemm& args);

// True if this CPU has bf16 units. Only then may gemm_bf16 be called.
bool has_bf16_units();
// a and b are bf16. Sums are in f32 and rounded once if c is bf16.
void gemm_bf16(const Gemm& args);

int max_gemm_threads();
void set_gemm_threads(int num_threads);

}  // namespace switchyard::cpu
