// SPDX-License-Identifier: Apache-2.0
// The queue of tiles: one warp of a cluster walks over its tiles and announces them, some ahead, to
// the warps of both blocks.
#pragma once

#include <type_traits>

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/tile_walk.cuh"

namespace switchyard::cuda::hopper {

// Run by all lanes of one warp of the first block, which also loads operands. After the loads of
// its first tile it announces two tiles, and from then on one per tile. It must never wait here for
// a warp that itself waits for operands. The finisher may be two tiles late, so the queue has
// places for at least kAhead + 3 tiles. Between announcements the walk's state is in shared memory,
// because this warp has no registers left for it.
template <typename Variant>
class TileAnnouncer {
 public:
  static constexpr int kAhead = 2;
  static_assert(kQueuedTiles >= kAhead + 3);

  // Announces only the first tile, so that its operands are asked for as soon as possible. In other
  // warps, `is_announcer` is false and nothing is announced.
  __device__ __forceinline__ TileAnnouncer(const KernelArgs& args, SharedMemory shared,
                                           bool is_announcer)
      : args_(args),
        shared_(shared),
        order_(args.tickets),
        is_announcer_(is_announcer),
        has_more_(is_announcer) {
    if (!is_announcer) return;
    save(WalkState{}, 0);
    announce();
  }

  // Called once a tile, for the first one when its operands are on their way.
  __device__ __forceinline__ void announce_ahead() {
#pragma unroll 1
    for (; missing_ > 0 && has_more_; --missing_) announce();
    missing_ = 1;
  }

  // Called after the last tile.
  __device__ __forceinline__ void end() {
    if (is_announcer_) order_.end();
  }

  static constexpr int kSameRows = 1;
  static constexpr int kEnd = 2;

 private:
  // Announces the next tile, or the end.
  __device__ __forceinline__ void announce() {
    int count = 0;
    WalkState state = load(count);
    Tile tile = {};
    has_more_ = TileWalk<Variant>(args_, state).advance_to(order_.next(), tile);
    const int place = count % kQueuedTiles;
    // Every reader must have finished with the tile that was here before.
    wait_for(shared_.taken(place), (count / kQueuedTiles & 1) ^ 1);
    const int flags = (tile.same_rows ? kSameRows : 0) | (has_more_ ? 0 : kEnd);
    if (const auto block = static_cast<std::uint32_t>(lane_of_thread()); block < 2) {
      const std::uint32_t to = address_in(block, shared_.queued_tile(place));
      const std::uint32_t barrier = address_in(block, shared_.announced(place));
      arrive_expecting_in_cluster(barrier, kQueuedTileBytes);
      store_in_cluster(to, make_int4(tile.group, tile.first_row, tile.rows, flags), barrier);
      store_in_cluster(to + 16, make_int4(tile.row_block, tile.column_block, tile.k_blocks, 0),
                       barrier);
    }
    save(state, count + 1);
  }

  __device__ __forceinline__ WalkState load(int& count) const {
    const uint4 first = load_shared(shared_.walk());
    const uint4 second = load_shared(shared_.walk() + 16);
    count = static_cast<int>(second.w);
    return {static_cast<int>(first.x), static_cast<int>(first.y),  static_cast<int>(first.z),
            static_cast<int>(first.w), static_cast<int>(second.x), static_cast<int>(second.y),
            static_cast<int>(second.z)};
  }
  __device__ __forceinline__ void save(const WalkState& state, int count) const {
    __syncwarp();  // all lanes have loaded
    if (lane_of_thread() == 0) {
      store_shared(shared_.walk(),
                   make_int4(state.next_place, state.group, state.first_pair, state.first_row));
      store_shared(shared_.walk() + 16,
                   make_int4(state.rows, state.row_blocks, state.group_pairs, count));
    }
    __syncwarp();
  }

  const KernelArgs& args_;
  const SharedMemory shared_;
  PairOrder order_;
  const bool is_announcer_;
  bool has_more_;
  int missing_ = kAhead;  // announcements due at the next call
};

// Makes the tile of the first block that of the block of this rank.
__device__ __forceinline__ void move_to_rank(Tile& tile, int rank, int columns) {
  (tile.same_rows ? tile.column_block : tile.row_block) += rank;
  tile.idle = tile.column_block >= columns;
}

// Reads the announced tiles, as the tiles of this thread's block.
template <typename Variant>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const KernelArgs& args, int rank, SharedMemory shared)
      : columns_(args.column_blocks), rank_(rank), shared_(shared) {}

  // Waits for the next tile. Returns false if there are no more. Called by all lanes of a warp.
  __device__ __forceinline__ bool next(Tile& tile) {
    const bool has_tile = read(tile);
    __syncwarp();
    if (lane_of_thread() == 0) arrive_at(shared_.taken(count_ % kQueuedTiles), 0);
    ++count_;
    return has_tile;
  }

 private:
  __device__ __forceinline__ bool read(Tile& tile) const {
    const int place = count_ % kQueuedTiles;
    wait_for(shared_.announced(place), count_ / kQueuedTiles & 1);
    const uint4 group = load_shared(shared_.queued_tile(place));
    const uint4 blocks = load_shared(shared_.queued_tile(place) + 16);
    tile.group = static_cast<int>(group.x);
    tile.first_row = static_cast<int>(group.y);
    tile.rows = static_cast<int>(group.z);
    tile.same_rows = (group.w & TileAnnouncer<Variant>::kSameRows) != 0;
    tile.row_block = static_cast<int>(blocks.x);
    tile.column_block = static_cast<int>(blocks.y);
    tile.k_blocks = static_cast<int>(blocks.z);
    move_to_rank(tile, rank_, columns_);
    return (group.w & TileAnnouncer<Variant>::kEnd) == 0;
  }

  const int columns_;
  const int rank_;
  const SharedMemory shared_;
  int count_ = 0;
};

// Without the queue: every warp walks over the tiles by itself, in their fixed order.
template <typename Variant>
class OwnTiles {
 public:
  __device__ __forceinline__ OwnTiles(const KernelArgs& args, int rank, SharedMemory /*shared*/)
      : args_(args), rank_(rank), order_(nullptr) {}
  __device__ __forceinline__ bool next(Tile& tile) {
    if (!TileWalk<Variant>(args_, state_).advance_to(order_.next(), tile)) return false;
    move_to_rank(tile, rank_, args_.column_blocks);
    return true;
  }

 private:
  const KernelArgs& args_;
  const int rank_;
  PairOrder order_;
  WalkState state_{};
};
class NoAnnouncer {
 public:
  __device__ __forceinline__ NoAnnouncer(const KernelArgs&, SharedMemory, bool) {}
  __device__ __forceinline__ void announce_ahead() const {}
  __device__ __forceinline__ void end() const {}
};

template <typename Variant>
using Tiles = std::conditional_t<Variant::kQueuesTiles, TileQueue<Variant>, OwnTiles<Variant>>;
template <typename Variant>
using Announcer = std::conditional_t<Variant::kQueuesTiles, TileAnnouncer<Variant>, NoAnnouncer>;

}  // namespace switchyard::cuda::hopper
