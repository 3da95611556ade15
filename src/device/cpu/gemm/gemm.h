// Matrix products on one thread, whose bits depend on their sizes and strides alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cpu/scratch.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

enum class Layout : bool { plain, transposed };

// A matrix of `stride` elements a row; transposed: it lies in memory the other way round.
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
  Dtype dtype = Dtype::f32;  // of a and b
  MatrixIn a;                // [m, k]
  MatrixIn b;                // [k, n]
  MatrixOut c;               // [m, n], of the same dtype or f32
  bool accumulate = false;   // c += a·b instead of c = a·b, rounded once
};

void gemm(const Gemm& args, Scratch& scratch);

// While it lives, products on this thread stay on this thread.
class SingleThreaded {
 public:
  SingleThreaded();
  ~SingleThreaded();
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int threads_before_;
};

// "oneDNN, bf16 by …": what makes the products.
const char* gemm_library();
// "oneDNN 2.6.0 for avx512_core": equal where the bits of products are.
std::string gemm_numerics();

}  // namespace switchyard::cpu
