// SPDX-License-Identifier: Apache-2.0
// Single-threaded matrix products, whose bits depend only on their sizes and strides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cpu/scratch.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

enum class Layout : bool { plain, transposed };

// A matrix whose rows in memory are `stride` elements apart. If `layout` is transposed, memory
// holds its transpose.
struct MatrixIn {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;
  Layout layout = Layout::plain;
};
struct MatrixOut {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  Dtype dtype = Dtype::f32;
};

struct Gemm {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Dtype dtype = Dtype::f32;  // dtype of a and b
  MatrixIn a;                // [m, k]
  MatrixIn b;                // [k, n]
  MatrixOut c;               // [m, n] of the same dtype or f32
  bool accumulate = false;   // c += a·b instead of c = a·b, rounded once
};

void gemm(const Gemm& args, Scratch& scratch);

// Keeps products that this thread starts on this thread, for the lifetime of the object.
class SingleThreaded {
 public:
  SingleThreaded();
  ~SingleThreaded();
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int threads_before_;
};

// Returns a description of the implementation: "oneDNN, bf16 by …".
const char* gemm_library();
// Returns a string such as "oneDNN 2.6.0 for avx512_core". If it is equal on two machines, so are
// the bits of products.
std::string gemm_numerics();

}  // namespace switchyard::cpu
