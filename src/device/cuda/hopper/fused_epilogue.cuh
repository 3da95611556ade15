// SPDX-License-Identifier: Apache-2.0
// The fused epilogues: finisher warps apply the activation or its gradient to a tile's sums while
// the tensor cores work on the next tile.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/experts/activations.cuh"
#include "device/cuda/hopper/hand_over.cuh"
#include "device/cuda/hopper/target.cuh"

namespace switchyard::cuda::hopper {

// Half of a consumer's sums: 64 rows of two boxes of 64 columns. Of a tile's four halves, the first
// ones of both consumers come before the second ones.
struct Half {
  int number;
  int row;
  int rows;  // up to 64; 0: there is no such half
  int column;

  __device__ __forceinline__ int consumer() const { return number % kConsumers; }
};

// Eight elements, still packed as loaded. They are unpacked only when used, because unpacking waits
// for the load.
struct PackedLine {
  static constexpr int kPairs = 4;
  std::uint32_t pairs[kPairs];

  __device__ __forceinline__ static PackedLine of(uint4 piece) {
    return {piece.x, piece.y, piece.z, piece.w};
  }
  __device__ __forceinline__ uint4 piece() const {
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  __device__ __forceinline__ float get(int pair, int e) const {
    return __uint_as_float(e == 0 ? pairs[pair] << 16 : pairs[pair] & 0xFFFF0000U);
  }
};

template <typename Variant>
class Finisher {
 public:
  __device__ __forceinline__ Finisher(const KernelArgs& args, int rank, SharedMemory shared)
      : args_(args),
        rank_(rank),
        shared_(shared),
        thread_(threadIdx.x - (Variant::kThreads - Variant::kFinishers)) {}

  template <typename Act>
  __device__ __forceinline__ void run() {
    TileWalk<Variant> walk(args_, rank_);
    Tile tile;
    while (walk.next(tile)) {
      const Weights weights(args_.activations, tile);
      Inputs next = {};
      Half half = find_half(tile, 0);
      if constexpr (!Variant::kActivates) load_first(half, next);
      while (half.rows > 0) {
        const Half after = find_half(tile, half.number + 1);
        if constexpr (Variant::kActivates) {
          activate<Act>(half, weights);
        } else {
          activate_backward<Act>(half, after, weights, next);
        }
        phases_ ^= 1U << half.consumer();
        half = after;
      }
    }
    if (thread_ == 0) wait_for_stores();
  }

 private:
  using Element = __nv_bfloat16;

  // Returns the half with this number, or the next one that has rows.
  __device__ __forceinline__ Half find_half(const Tile& tile, int number) const {
    constexpr int kColumns = Variant::kColumnsOfPart / 2;
    if (!has_rows<Variant>(tile, number % kConsumers)) ++number;
    if (number >= 2 * kConsumers || !has_rows<Variant>(tile, 0)) return {};
    const Target target = find_target<Variant>(args_, tile, number % kConsumers);
    return {number, target.row, min(target.rows, 64),
            target.column + number / kConsumers * kColumns};
  }

  __device__ __forceinline__ void wait_until_filled(int consumer) const {
    wait_for(shared_.filled(consumer), phases_ >> consumer & 1U);
  }

  // The routing weights of a tile's rows. In every warp, each lane holds four.
  class Weights {
   public:
    __device__ __forceinline__ Weights(const Activations& act, const Tile& tile) {
      if (act.weights == nullptr || tile.idle) return;
      const auto lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kTileRows / 32; ++i) {
        const int in_group = tile.row_block * kTileRows + i * 32 + lane;
        if (in_group >= tile.rows) continue;
        const std::int64_t row = tile.first_row + in_group;
        values_[i] = act.weights[act.weight_sources != nullptr ? act.weight_sources[row] : row];
      }
      // Waits for the loads here. Later, the wait would include loads issued after them.
#pragma unroll
      for (float& value : values_) value = __shfl_sync(~0U, value, lane);
    }
    // Returns the weight of a consumer's row. All lanes call it together, each for its own row.
    __device__ __forceinline__ float of(int consumer, int line) const {
      const float first = __shfl_sync(~0U, consumer == 0 ? values_[0] : values_[2], line);
      const float second = __shfl_sync(~0U, consumer == 0 ? values_[1] : values_[3], line);
      return line < 32 ? first : second;
    }

   private:
    float values_[kTileRows / 32] = {1.0F, 1.0F, 1.0F, 1.0F};
  };

  __device__ __forceinline__ static Element* element(const Rows& rows, std::int64_t row,
                                                     int column) {
    return static_cast<Element*>(const_cast<void*>(rows.data)) + row * rows.stride + column;
  }
  __device__ __forceinline__ static void store(Element* to, const PackedLine& line) {
    __stcs(reinterpret_cast<uint4*>(to), line.piece());  // evict-first, as in store_box()
  }
  __device__ __forceinline__ static PackedLine load_staged(std::uint32_t box, int line, int piece) {
    return PackedLine::of(load_shared(piece_of_box(box, line, piece)));
  }

  // Stores the activation of a gate box and an up box, and the boxes too if `inner` is kept.
  template <typename Act>
  __device__ __forceinline__ void activate(const Half& half, const Weights& weights) {
    constexpr int kPieces = 8;  // per line
    constexpr int kLines = Variant::kFinishers / kPieces;
    const Activations& act = args_.activations;
    const std::uint32_t gates = shared_.staging(half.consumer(), 0);
    const std::uint32_t ups = shared_.staging(half.consumer(), 1);
    const bool keeps = act.inner.data != nullptr;
    const bool in_bulk = keeps && half.rows == 64;
    wait_until_filled(half.consumer());
    if (in_bulk && thread_ == 0 && half.column < args_.columns) {
      store_box(&args_.c.whole, {half.column, half.row, 0, 0}, gates);
      store_box(&args_.c.whole, {half.column, half.row, 0, 1}, ups);
      commit_stores();
    }
    const int piece = thread_ % kPieces;
    const int column = half.column + piece * 8;
    // A warp continues while any of its rows is valid, because fetching weights is a warp shuffle.
#pragma unroll 2
    for (int line = thread_ / kPieces; line / 4 * 4 < half.rows; line += kLines) {
      const float weight = weights.of(half.consumer(), line);
      if (line >= half.rows || column >= args_.columns) continue;
      const std::int64_t row = half.row + line;
      const PackedLine gate = load_staged(gates, line, piece);
      const PackedLine up = load_staged(ups, line, piece);
      PackedLine result;
#pragma unroll
      for (int pair = 0; pair < PackedLine::kPairs; ++pair) {
        const auto value = [&](int e) {
          return weight * Act::value(gate.get(pair, e), up.get(pair, e), act.constants);
        };
        result.pairs[pair] = round_pair(value(0), value(1));
      }
      store(element(act.activated, row, column), result);
      if (!keeps || in_bulk) continue;
      store(element(act.inner, row, column), gate);
      store(element(act.inner, row, args_.columns + column), up);
    }
    if (in_bulk && thread_ == 0) wait_until_stores_have_read<0>();
    arrive(shared_.drained(half.consumer()));
  }

  // A thread's part of a row in backward: eight of 128 columns.
  struct Inputs {
    PackedLine gate;
    PackedLine up;
  };

  // In backward, 16 threads share 128 columns of a row, so the six warps cover 12 rows per step.
  static constexpr int kPieces = 16;
  static constexpr int kStep = Variant::kFinishers / kPieces;

  // Loads this thread's inputs of row `line` of the half.
  __device__ __forceinline__ void load_line(const Half& half, int line, Inputs& inputs) const {
    const int column = half.column + thread_ % kPieces * 8;
    if (line >= half.rows || column >= args_.columns) return;
    inputs = load_inputs(element(args_.activations.inner, half.row + line, column));
  }
  __device__ __forceinline__ void load_first(const Half& half, Inputs& inputs) const {
    load_line(half, thread_ / kPieces, inputs);
  }

  // The sums are the gradient of the activated values, before the routing weight. The inputs of the
  // next row are loaded ahead, including the first row of the tile's next half.
  template <typename Act>
  __device__ __forceinline__ void activate_backward(const Half& half, const Half& after,
                                                    const Weights& weights, Inputs& next) {
    const Activations& act = args_.activations;
    const int piece = thread_ % kPieces;
    const int column = half.column + piece * 8;
    const int lines = column < args_.columns ? half.rows : 0;
    const std::uint32_t box = shared_.staging(half.consumer(), piece / 8);
    // A warp continues while any of its rows is valid: its lanes exchange weights and dot products.
    const auto has_rows_of_warp = [&](int line) { return line / 2 * 2 < half.rows; };
    int line = thread_ / kPieces;
    if (!has_rows_of_warp(line)) load_first(after, next);
    wait_until_filled(half.consumer());
    for (; has_rows_of_warp(line); line += kStep) {
      const Inputs now = next;
      const PackedLine d = load_staged(box, line, piece % 8);
      const float weight = weights.of(half.consumer(), line);
      if (has_rows_of_warp(line + kStep)) {
        load_line(half, line + kStep, next);
      } else {
        load_first(after, next);
      }
      const float dot = line_backward<Act>(d, now, weight, line < lines,
                                           element(act.inner, half.row + line, column),
                                           element(act.activated, half.row + line, column));
      store_dot(half, line, column, dot);
    }
    arrive(shared_.drained(half.consumer()));
  }

  __device__ __forceinline__ Inputs load_inputs(const Element* gate) const {
    const auto load = [](const Element* from) {
      return PackedLine::of(__ldcs(reinterpret_cast<const uint4*>(from)));
    };
    return {load(gate), load(gate + args_.columns)};
  }

  // Does for one line what activate_backward() of row_passes.h does. Returns the line's part of
  // ⟨d, activation⟩.
  template <typename Act>
  __device__ __forceinline__ float line_backward(const PackedLine& d, const Inputs& in,
                                                 float weight, bool is_there, Element* inner,
                                                 Element* activated) const {
    PackedLine d_gate;
    PackedLine d_up;
    PackedLine values;
    float dot = 0.0F;
#pragma unroll
    for (int pair = 0; pair < PackedLine::kPairs; ++pair) {
      float results[3][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float d_value = d.get(pair, e);
        const Derivatives slopes =
            Act::derivatives(in.gate.get(pair, e), in.up.get(pair, e), args_.activations.constants);
        dot += d_value * slopes.value;
        results[0][e] = weight * slopes.value;
        results[1][e] = weight * d_value * slopes.d_gate;
        results[2][e] = weight * d_value * slopes.d_up;
      }
      values.pairs[pair] = round_pair(results[0][0], results[0][1]);
      d_gate.pairs[pair] = round_pair(results[1][0], results[1][1]);
      d_up.pairs[pair] = round_pair(results[2][0], results[2][1]);
    }
    if (is_there) {
      store(activated, values);
      store(inner, d_gate);
      store(inner + args_.columns, d_up);
    }
    return is_there ? dot : 0.0F;
  }

  // Adds up the dot products over the sixteen threads that share 128 columns, and stores the sum.
  __device__ __forceinline__ void store_dot(const Half& half, int line, int column,
                                            float dot) const {
    const Activations& act = args_.activations;
    if (act.dots == nullptr) return;
#pragma unroll
    for (int lanes = kPieces / 2; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(~0U, dot, lanes);
    if (thread_ % kPieces != 0 || line >= half.rows || column >= args_.columns) return;
    act.dots[std::int64_t{half.row + line} * act.dot_blocks + column / 128] = dot;
  }

  const KernelArgs& args_;
  const int rank_;
  const SharedMemory shared_;
  const int thread_;
  std::uint32_t phases_ = 0;  // one bit per consumer
};

}  // namespace switchyard::cuda::hopper
