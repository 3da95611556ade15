// SPDX-License-Identifier: Apache-2.0
// The PTX instructions that the kernels use, each named after its mnemonic with _ for punctuation.
// translate.py turns asm statements into calls of these, operands in the order of the statement.
#pragma once

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

#include "emulation/machine.h"

struct CUtensorMap_st;

namespace emulation {

// Copies between a tensor and shared memory, whose addresses are swizzled. Elements outside of the
// tensor are read as zeros, and not written.
std::size_t bytes_of_box(const CUtensorMap_st& map);
// Loads the box at this corner at some time, into this block or all of the cluster, and counts its
// bytes at the barrier.
void load_box_later(const CUtensorMap_st* map, const int (&corner)[4], std::uint32_t to,
                    std::uint32_t barrier, bool for_both);
void store_box_later(const CUtensorMap_st* map, const int (&corner)[4], std::uint32_t from);
void copy_later(std::uint32_t to, const void* from, std::size_t bytes, std::size_t wanted);
void arrive_after_copies(std::uint32_t barrier);
void multiply(int columns, float* sums, std::uint64_t a, std::uint64_t b, int continues,
              bool a_is_across, bool b_is_across);
void commit_products();
void load_matrices(std::uint32_t* const (&to)[4], std::uint32_t from, bool is_transposed);
void store_matrices(std::uint32_t to, const std::uint32_t (&values)[4], bool is_transposed);
void multiply_in_warp(float* const (&sums)[4], const std::uint32_t (&a)[4],
                      const std::uint32_t (&b)[2], const float (&c)[4]);

namespace ptx {

// mbarriers
inline void mbarrier_init_shared_cta_b64(std::uint32_t barrier, int arrivals) {
  init_barrier(barrier, arrivals);
}
inline void mbarrier_arrive_shared_cta_b64(std::uint32_t barrier) {
  arrive(*self().block, barrier, 0);
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(std::uint32_t barrier, std::uint32_t bytes) {
  arrive(*self().block, barrier, static_cast<int>(bytes));
}
inline void mbarrier_arrive_expect_tx_shared_cluster_b64(std::uint32_t barrier,
                                                         std::uint32_t bytes) {
  arrive(block_of(barrier), barrier & 0xFFFFFF, static_cast<int>(bytes));
}
inline void mbarrier_try_wait_parity_shared_cta_b64__bra__bra(std::uint32_t barrier,
                                                              std::uint32_t parity) {
  wait_for_phase(barrier, parity);
}
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(std::uint32_t barrier) {
  arrive_after_copies(barrier);
}

// Clusters
inline std::uint32_t in_block(std::uint32_t address, std::uint32_t rank) {
  return address | (rank + 1) << 24;
}
inline void mapa_shared_cluster_u32(std::uint32_t& there, std::uint32_t address,
                                    std::uint32_t rank) {
  there = in_block(address, rank);
}
inline void mapa_shared_cluster_u32__mbarrier_arrive_shared_cluster_b64(std::uint32_t barrier,
                                                                        std::uint32_t rank) {
  arrive(block_of(in_block(barrier, rank)), barrier, 0);
}
inline void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_v4_u32(std::uint32_t to, int x,
                                                                           int y, int z, int w,
                                                                           std::uint32_t barrier) {
  std::byte* const at = shared_at(to, 16);
  Block& block = block_of(barrier);
  self().block->machine->later([at, &block, barrier, x, y, z, w] {
    const int values[4] = {x, y, z, w};
    std::memcpy(at, values, 16);
    complete_bytes(block, barrier & 0xFFFFFF, 16);
  });
}
inline void mov_u32_cluster_ctarank(std::uint32_t& rank) { rank = self().block->rank; }
inline void barrier_cluster_arrive_aligned__barrier_cluster_wait_aligned() { sync_cluster(); }

// Fences do nothing: memory is always in order here.
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
template <typename Map>
void fence_proxy_tensormap_generic_acquire_sys(const Map* /*map*/) {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() { self().block->has_waited = true; }
inline void setmaxnreg_inc_sync_aligned_u32(int /*registers*/) {}
inline void setmaxnreg_dec_sync_aligned_u32(int /*registers*/) {}
inline void prefetch_global_L2(const void* /*address*/) {}
template <typename Map>
void prefetch_tensormap(const Map* /*map*/) {}

inline void bar_sync(int barrier, int threads) { sync_block(barrier, threads); }

// TMA
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(
    std::uint32_t to, const CUtensorMap_st* map, std::uint32_t barrier, int column, int row,
    int group, int part) {
  load_box_later(map, {column, row, group, part}, to, barrier, false);
}
inline void
cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    std::uint32_t to, const CUtensorMap_st* map, std::uint32_t barrier, int column, int row,
    int group, int part, std::uint16_t mask) {
  if (mask != 3) fail("a multicast to others than both blocks");
  load_box_later(map, {column, row, group, part}, to, barrier, true);
}
inline void
createpolicy_fractional_L2_evict_first_b64__cp_async_bulk_tensor_4d_global_shared_cta_bulk_group_L2_cache_hint(
    const CUtensorMap_st* map, std::uint32_t from, int column, int row, int group, int part) {
  store_box_later(map, {column, row, group, part}, from);
}
inline void cp_async_bulk_commit_group() {
  Thread& thread = self();
  thread.stores.push_back(std::move(thread.open_stores));
  thread.open_stores.clear();
}
inline void cp_async_bulk_wait_group_read(int pending) {
  finish_copies(self().stores, static_cast<std::size_t>(pending));
}
inline void cp_async_bulk_wait_group(int pending = 0) {
  finish_copies(self().stores, static_cast<std::size_t>(pending));
}

// cp.async
inline void cp_async_cg_shared_global_L2_128B(std::uint32_t to, const void* from, int wanted = 16) {
  copy_later(to, from, 16, static_cast<std::size_t>(wanted));
}
inline void cp_async_ca_shared_global(std::uint32_t to, const void* from, int wanted) {
  copy_later(to, from, 4, static_cast<std::size_t>(wanted));
}
inline void cp_async_commit_group() {
  Thread& thread = self();
  thread.copies.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}
inline void cp_async_wait_group(int pending) {
  finish_copies(self().copies, static_cast<std::size_t>(pending));
}

// Products
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { commit_products(); }
inline void wgmma_wait_group_sync_aligned(int pending) { finish_products(pending); }
inline void setp_ne_b32__wgmma_mma_async_sync_aligned_m64n256k16_f32_bf16_bf16(
    float* sums, float*, float*, float*, std::uint64_t a, std::uint64_t b, int continues,
    bool a_is_across, bool b_is_across) {
  multiply(256, sums, a, b, continues, a_is_across, b_is_across);
}
inline void setp_ne_b32__wgmma_mma_async_sync_aligned_m64n128k16_f32_bf16_bf16(
    float* sums, float*, std::uint64_t a, std::uint64_t b, int continues, bool a_is_across,
    bool b_is_across) {
  multiply(128, sums, a, b, continues, a_is_across, b_is_across);
}
inline void setp_ne_b32__wgmma_mma_async_sync_aligned_m64n64k16_f32_bf16_bf16(
    float* sums, std::uint64_t a, std::uint64_t b, int continues, bool a_is_across,
    bool b_is_across) {
  multiply(64, sums, a, b, continues, a_is_across, b_is_across);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2,
                                                                float& d3, std::uint32_t a0,
                                                                std::uint32_t a1, std::uint32_t a2,
                                                                std::uint32_t a3, std::uint32_t b0,
                                                                std::uint32_t b1) {
  multiply_in_warp({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3});
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(std::uint32_t& r0, std::uint32_t& r1,
                                                     std::uint32_t& r2, std::uint32_t& r3,
                                                     std::uint32_t from) {
  load_matrices({&r0, &r1, &r2, &r3}, from, false);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(std::uint32_t& r0, std::uint32_t& r1,
                                                           std::uint32_t& r2, std::uint32_t& r3,
                                                           std::uint32_t from) {
  load_matrices({&r0, &r1, &r2, &r3}, from, true);
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(std::uint32_t to, std::uint32_t r0,
                                                     std::uint32_t r1, std::uint32_t r2,
                                                     std::uint32_t r3) {
  store_matrices(to, {r0, r1, r2, r3}, false);
}
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(std::uint32_t to, std::uint32_t r0,
                                                           std::uint32_t r1, std::uint32_t r2,
                                                           std::uint32_t r3) {
  store_matrices(to, {r0, r1, r2, r3}, true);
}

// Memory
template <typename Word>
void ld_shared_v4_u32(Word& x, Word& y, Word& z, Word& w, std::uint32_t from) {
  const auto* const at = reinterpret_cast<const Word*>(shared_at(from, 16));
  x = at[0], y = at[1], z = at[2], w = at[3];
}
inline void st_shared_v4_u32(std::uint32_t to, std::uint32_t x, std::uint32_t y, std::uint32_t z,
                             std::uint32_t w) {
  const std::uint32_t values[4] = {x, y, z, w};
  std::memcpy(shared_at(to, 16), values, 16);
}
inline void st_shared_v4_u32(std::uint32_t to, std::uint32_t value) {  // one operand, four times
  st_shared_v4_u32(to, value, value, value, value);
}
inline void st_shared_v4_b32(std::uint32_t to, std::uint32_t x, std::uint32_t y, std::uint32_t z,
                             std::uint32_t w) {
  st_shared_v4_u32(to, x, y, z, w);
}
inline void ld_shared_u32(std::uint32_t& value, std::uint32_t from) {
  std::memcpy(&value, shared_at(from, 4), 4);
}
inline void st_shared_u32(std::uint32_t to, std::uint32_t value) {
  std::memcpy(shared_at(to, 4), &value, 4);
}
inline void setp_ne_s32__ld_global_v4_u32(std::uint32_t& x, std::uint32_t& y, std::uint32_t& z,
                                          std::uint32_t& w, std::size_t address, int wanted) {
  if (wanted == 0) return;
  if (address % 16 != 0) fail("a load of 16 bytes from a misaligned address");
  std::uint32_t values[4];
  std::memcpy(values, reinterpret_cast<const void*>(address), 16);
  x = values[0], y = values[1], z = values[2], w = values[3];
}
inline void setp_ne_s32__ld_global_cs_v4_u32(std::uint32_t& x, std::uint32_t& y, std::uint32_t& z,
                                             std::uint32_t& w, std::size_t address, int wanted) {
  setp_ne_s32__ld_global_v4_u32(x, y, z, w, address, wanted);
}
inline void st_release_sys_global_u64(std::uint64_t* at, std::uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
// Reads what a kernel of another rank writes, on another thread of the host.
inline void ld_acquire_sys_global_u64(std::uint64_t& value, const std::uint64_t* at) {
  yield();
  value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

// Arithmetic
inline void ex2_approx_ftz_f32(float& value) { value = std::exp2(value); }
inline void rcp_approx_ftz_f32(float& value) { value = 1.0F / value; }
template <typename Pointer>
void mad_wide_s32(Pointer*& sum, int a, int b, Pointer* c) {
  sum = c + static_cast<std::int64_t>(a) * b;
}
inline void mov_u64_globaltimer(std::uint64_t& time) {
  std::this_thread::yield();
  time = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace ptx
}  // namespace emulation
