// SPDX-License-Identifier: Apache-2.0
// Wrappers for Hopper's PTX instructions: mbarriers, TMA copies, proxy fences, clusters, dependent
// launches and register reallocation.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace switchyard::cuda::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// An mbarrier is 8 bytes of shared memory. The default forms of its operations acquire and release
// at CTA scope; the .cluster forms are slower, and nothing here needs them.
__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and makes the current phase also wait for this many bytes of TMA loads.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once all copies that this thread has issued so far (copy_piece) have completed.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies 16 bytes from global to shared memory; writes zeros instead if they are not `wanted`.
__device__ __forceinline__ void copy_piece(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_piece(std::uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}

// Arrives at the barrier with the same address in a block of the cluster, which may be this one.
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, std::uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// Waits until the phase of this parity completes. The phase before the first counts as complete.
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

// The address of the same variable in a block of the cluster, which may be this one.
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t block, std::uint32_t address) {
  std::uint32_t there = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// Writes to the shared memory of a block of the cluster, and counts the bytes at the barrier, as a
// TMA load does. `to` and `barrier` are from address_in(), like those of the next function.
__device__ __forceinline__ void store_in_cluster(std::uint32_t to, const int4& value,
                                                 std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void arrive_expecting_in_cluster(std::uint32_t barrier,
                                                            std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Coordinates of a box in a 4-D tensor, for TMA copies. Elements outside the tensor are loaded as
// zeros and never stored.
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

// Multicasts the box to the same offset in both blocks of the cluster and signals each block's
// own barrier.
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

// Stores with an L2 evict-first hint, so that results do not evict operands that are read again.
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

// Waits until all but this thread's last kPending store groups have finished reading shared memory.
template <int kPending>
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Fetches a tensor map that a later copy uses.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Must be called before this thread uses a tensor map that was copied to global memory.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Orders accesses to shared memory (this thread's, and those it has synchronised with through a
// barrier) before later TMA copies and wgmma, which use the async proxy.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Lets the next kernel in the stream launch early (programmatic dependent launch). That kernel must
// wait for this one to end before it touches the same memory.
__device__ __forceinline__ void let_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the preceding kernels have ended and their writes are visible.
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

// Stores four 8 × 8 matrices of 16-bit elements from a warp's registers. Lanes 8i … 8i + 7 pass the
// row addresses of matrix i.
__device__ __forceinline__ void store_matrices(std::uint32_t to, const std::uint32_t* values) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// Like store_matrices(), with each matrix transposed.
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

__device__ __forceinline__ void store_shared(std::uint32_t to, const int4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t from) {
  std::uint32_t value = 0;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_word(std::uint32_t to, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void zero_shared(std::uint32_t to) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

}  // namespace switchyard::cuda::hopper
