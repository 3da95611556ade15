// The instructions of Hopper that C++ has no words for: barriers in shared memory, bulk copies of
// boxes of tensors, registers that change hands.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace switchyard::cuda::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers: 8 bytes of shared memory. Their default forms acquire and release; the .cluster ones
// are slower, and nothing here needs them.
__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and makes the phase wait for this many bytes of bulk copies too.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once the copies that this thread has begun so far (copy_piece) have come.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes of global memory, or zeros where they are not wanted.
__device__ __forceinline__ void copy_piece(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_piece(std::uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}

// At the barrier of the same address in another block of the cluster, or in this one.
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, std::uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// Until the phase of this parity is over; the phase before the first counts as over.
__device__ __forceinline__ void wait_for(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE%=;\n"
      "bra AGAIN%=;\n"
      "DONE%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bulk copies of a box of a 4-D tensor. What lies outside the tensor is zero on the way in, and
// left alone on the way out.
struct Corner {
  int column;
  int row;
  int group;
  int part;
};

__device__ __forceinline__ void load_box(const CUtensorMap* map, const Corner& from,
                                         std::uint32_t to, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(from.column), "r"(from.row), "r"(from.group), "r"(from.part)
      : "memory");
}

// To the same place in both blocks of the cluster, each told by its own barrier.
__device__ __forceinline__ void load_box_for_both(const CUtensorMap* map, const Corner& from,
                                                  std::uint32_t to, std::uint32_t barrier) {
  constexpr std::uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(from.column), "r"(from.row), "r"(from.group), "r"(from.part),
      "h"(kBoth)
      : "memory");
}

// What is stored is the first to leave the cache: it would push out what is read again.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const Corner& to,
                                          std::uint32_t from) {
  asm volatile(
      "{\n.reg .b64 first_out;\n"
      "createpolicy.fractional.L2::evict_first.b64 first_out, 1.0;\n"
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5}], [%1], first_out;\n}" ::"l"(map),
      "r"(from), "r"(to.column), "r"(to.row), "r"(to.group), "r"(to.part)
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the thread's last kPending groups of stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Before this thread uses a map that lies in global memory, where a copy put it.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Makes reads and writes of shared memory, this thread's and those that a barrier has told it of,
// seen by bulk copies and by wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Kernels that follow in the stream may be launched from here on. They wait for this one's end
// before they touch what it touches.
__device__ __forceinline__ void let_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the kernels before have ended, and what they wrote is there.
__device__ __forceinline__ void wait_for_kernels_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ std::uint32_t rank_in_cluster() {
  std::uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 × 8 matrices of 16-bit elements from a warp's registers; lanes 8i … 8i + 7 give the
// addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices(std::uint32_t to, const std::uint32_t* values) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// The same, each of them transposed.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t to,
                                                          const std::uint32_t* values) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(std::uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ void zero_shared(std::uint32_t to) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

}  // namespace switchyard::cuda::hopper
