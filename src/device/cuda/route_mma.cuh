// Tiles of bf16 in shared memory and the tensor core instructions that read them, for sm_80 and up.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace switchyard::cuda {

struct Bf16Matrix {
  const __nv_bfloat16* data;
  std::int64_t row_stride;
  std::int64_t rows;
  int columns;
};

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes: the first `bytes` of them from `from`, the others 0. Both on 16 bytes.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
// c [16, 8] += a [16, 16] · b [16, 8], in f32.
__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight elements of which `count` are there. What is not aligned is copied at once, by hand.
template <bool kAligned>
__device__ inline void stage_eight(std::byte* to, const __nv_bfloat16* from, int count) {
  if constexpr (kAligned) {
    copy_async(shared_address(to), from, 2 * count);
  } else {
    const auto* bits = reinterpret_cast<const unsigned short*>(from);
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = 2 * i < count ? bits[2 * i] : 0u;
      const unsigned high = 2 * i + 1 < count ? bits[2 * i + 1] : 0u;
      words[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Where eight elements of a tile lie: rows of kColumns, the octets of each in an order of its own,
// so that eight rows of one octet are in different banks.
template <int kColumns>
__device__ inline int octet_offset(int row, int octet) {
  return row * kColumns * 2 + ((octet ^ (row & 7)) << 4);
}

// A tile of rows and columns from the matrix on; zeros beyond it, and for rows that `keeps` [rows]
// names 0.
template <int kRows, int kColumns, int kThreads, bool kAligned>
__device__ inline void stage_tile(std::byte* tile, const Bf16Matrix& from, std::int64_t first_row,
                                  int first_column, const std::int32_t* keeps = nullptr) {
  constexpr int kOctets = kColumns / 8;
  static_assert(kRows * kOctets % kThreads == 0);
#pragma unroll
  for (int n = 0; n < kRows * kOctets / kThreads; ++n) {
    const int i = n * kThreads + static_cast<int>(threadIdx.x);
    const int row = i / kOctets;
    const int octet = i % kOctets;
    const std::int64_t r = first_row + row;
    const int column = first_column + octet * 8;
    const bool is_there = r < from.rows && (keeps == nullptr || keeps[r] != 0);
    const int count = is_there ? max(0, min(8, from.columns - column)) : 0;
    const auto* source = count > 0 ? from.data + r * from.row_stride + column : from.data;
    stage_eight<kAligned>(tile + octet_offset<kColumns>(row, octet), source, count);
  }
}

}  // namespace switchyard::cuda
