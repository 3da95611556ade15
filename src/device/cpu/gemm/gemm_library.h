// What a library of matrix products offers: one of gemm_onednn.cpp and gemm_plain.cpp is built.
#pragma once

#include "device/cpu/gemm/gemm.h"

namespace switchyard::cpu {

// All matrices f32.
void gemm_f32(const Gemm& args);

// Whether this CPU multiplies bf16 itself; if so, gemm_bf16 may be called.
bool has_bf16_units();
// a and b bf16; sums in f32, rounded once if c is bf16.
void gemm_bf16(const Gemm& args);

int max_gemm_threads();
void set_gemm_threads(int num_threads);

}  // namespace switchyard::cpu
