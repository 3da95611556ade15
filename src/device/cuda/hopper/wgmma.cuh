// SPDX-License-Identifier: Apache-2.0
// wgmma: a warpgroup accumulates 64 rows of 64, 128 or 256 elements in f32, from bf16 operands in
// shared memory.
#pragma once

#include <cstdint>

namespace switchyard::cuda::hopper {

// Layout of an operand in shared memory: lines of 128 bytes, swizzled in blocks of eight lines. A
// line holds 64 elements along k (K-major) or across it (MN-major).
enum class Lines { along_k, across_k };

// Returns the wgmma matrix descriptor of an operand. Offsets are in units of 16 bytes: eight lines
// are 64 units, and 64 columns of an MN-major operand (64 lines) are 512.
template <Lines kLines>
__device__ __forceinline__ std::uint64_t describe(std::uint32_t address) {
  constexpr std::uint64_t kLeading = kLines == Lines::along_k ? 1 : 512;
  constexpr std::uint64_t kEightLines = 64;
  constexpr std::uint64_t kSwizzle128 = 1;
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) | kLeading << 16 | kEightLines << 32 |
         kSwizzle128 << 62;
}

constexpr int kSlice = 16;  // of k, in one wgmma

// Descriptor step between consecutive slices: 32 bytes in every line, or 16 lines.
template <Lines kLines>
constexpr std::uint32_t kNextSlice = kLines == Lines::along_k ? 2 : 128;

// Returns the descriptor of what lies this many units further. Only the low word changes, so that
// no carry is computed.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t units) {
  constexpr std::uint64_t kHighWord = std::uint64_t{0xFFFFFFFF} << 32;
  return (descriptor & kHighWord) | (static_cast<std::uint32_t>(descriptor) + units);
}

// A compiler barrier for the accumulators. The compiler does not know that wgmma writes them until
// it has been waited for, and must not move, copy or read them across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&sums)[kCount]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

template <int kCount>
__device__ __forceinline__ void fence_sums(float (&sums)[kCount]) {
  pin(sums);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define SWITCHYARD_32_REGISTERS \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SWITCHYARD_64_REGISTERS SWITCHYARD_32_REGISTERS ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SWITCHYARD_128_REGISTERS SWITCHYARD_64_REGISTERS ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SWITCHYARD_8_SUMS(i) \
  "+f"(sums[(i)]), "+f"(sums[(i) + 1]), "+f"(sums[(i) + 2]), "+f"(sums[(i) + 3]), \
  "+f"(sums[(i) + 4]), "+f"(sums[(i) + 5]), "+f"(sums[(i) + 6]), "+f"(sums[(i) + 7])
#define SWITCHYARD_32_SUMS(i) \
  SWITCHYARD_8_SUMS(i), SWITCHYARD_8_SUMS((i) + 8), \
  SWITCHYARD_8_SUMS((i) + 16), SWITCHYARD_8_SUMS((i) + 24)

// sums (+)= A · Bᵀ over 16 elements of k, A [64, 16] and B [256, 16]. Starts from zero if
// `continues` is 0. Thread t holds columns 8 j + 2 (t % 4) and the next, of two rows:
// sums[4 j], sums[4 j + 1] of row 16 (t / 32) + t % 32 / 4; sums[4 j + 2], sums[4 j + 3] of the
// row eight below.
template <Lines kA, Lines kB>
__device__ __forceinline__ void multiply(float (&sums)[128], std::uint64_t a, std::uint64_t b,
                                         int continues) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SWITCHYARD_128_REGISTERS "}, "
      "%128, %129, p, 1, 1, %131, %132;\n}\n"
      : SWITCHYARD_32_SUMS(0), SWITCHYARD_32_SUMS(32), SWITCHYARD_32_SUMS(64),
        SWITCHYARD_32_SUMS(96)
      : "l"(a), "l"(b), "r"(continues), "n"(kA == Lines::across_k), "n"(kB == Lines::across_k));
}

// The same for 128 columns, whose sums begin at kFirst.
template <Lines kA, Lines kB, int kFirst, int kCount>
__device__ __forceinline__ void multiply_half(float (&sums)[kCount], std::uint64_t a,
                                              std::uint64_t b, int continues) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SWITCHYARD_64_REGISTERS "}, "
      "%64, %65, p, 1, 1, %67, %68;\n}\n"
      : SWITCHYARD_32_SUMS(kFirst), SWITCHYARD_32_SUMS(kFirst + 32)
      : "l"(a), "l"(b), "r"(continues), "n"(kA == Lines::across_k), "n"(kB == Lines::across_k));
}
template <Lines kA, Lines kB>
__device__ __forceinline__ void multiply(float (&sums)[64], std::uint64_t a, std::uint64_t b,
                                         int continues) {
  multiply_half<kA, kB, 0>(sums, a, b, continues);
}

// The same for 64 columns.
template <Lines kA, Lines kB>
__device__ __forceinline__ void multiply(float (&sums)[32], std::uint64_t a, std::uint64_t b,
                                         int continues) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SWITCHYARD_32_REGISTERS "}, "
      "%32, %33, p, 1, 1, %35, %36;\n}\n"
      : SWITCHYARD_32_SUMS(0)
      : "l"(a), "l"(b), "r"(continues), "n"(kA == Lines::across_k), "n"(kB == Lines::across_k));
}
// clang-format on

#undef SWITCHYARD_32_REGISTERS
#undef SWITCHYARD_64_REGISTERS
#undef SWITCHYARD_128_REGISTERS
#undef SWITCHYARD_8_SUMS
#undef SWITCHYARD_32_SUMS

}  // namespace switchyard::cuda::hopper
