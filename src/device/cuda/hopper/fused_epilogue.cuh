// SPDX-License-Identifier: Apache-2.0
// The fused epilogues: finisher warps apply the activation or its gradient to a tile's sums while
// the tensor cores work on the next tile.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/experts/activations.cuh"
#include "device/cuda/experts/lines.cuh"
#include "device/cuda/hopper/hand_over.cuh"
#include "device/cuda/hopper/target.cuh"
#include "device/cuda/hopper/tile_queue.cuh"

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
    Tiles<Variant> tiles(args_, rank_, shared_);
    Tile tile;
    while (tiles.next(tile)) {
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
    const int halves = has_right_half<Variant>(args_, tile) ? 2 : 1;
    if (number >= halves * kConsumers || !has_rows<Variant>(tile, 0)) return {};
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
      if (act.weights.data == nullptr || tile.idle) return;
      const auto lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kTileRows / 32; ++i) {
        const int in_group = tile.row_block * kTileRows + i * 32 + lane;
        if (in_group >= tile.rows) continue;
        const std::int64_t row = tile.first_row + in_group;
        values_[i] = number_of(act.weights, row);
      }
      // Waits for the loads here. Later, the wait would include loads issued after them.
#pragma unroll
      for (float& value : values_) value = __shfl_sync(~0U, value, lane);
    }
    // Returns the weight of a consumer's row. All lanes call it together, each for its own row. The
    // rows of a warp must all be among the first 32 of the consumer's 64, or all among the last.
    __device__ __forceinline__ float of(int consumer, int line) const {
      const float first = consumer == 0 ? values_[0] : values_[2];
      const float second = consumer == 0 ? values_[1] : values_[3];
      return __shfl_sync(~0U, line < 32 ? first : second, line);
    }

   private:
    float values_[kTileRows / 32] = {1.0F, 1.0F, 1.0F, 1.0F};
  };

  // A column of rows in memory. With 32-bit rows and strides an address is one instruction.
  class Column {
   public:
    __device__ __forceinline__ Column(const Rows& rows, int column)
        : data_(static_cast<std::byte*>(const_cast<void*>(rows.data)) +
                column * static_cast<int>(sizeof(Element))),
          stride_(static_cast<int>(rows.stride) * static_cast<int>(sizeof(Element))) {}

    __device__ __forceinline__ Element* at(int row) const {
      std::byte* there = nullptr;
      asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(there) : "r"(row), "r"(stride_), "l"(data_));
      return reinterpret_cast<Element*>(there);
    }

   private:
    std::byte* data_;
    int stride_;
  };
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
    const int piece = thread_ % kPieces;
    const int column = half.column + piece * 8;
    const Column activated(act.activated, column);
    wait_until_filled(half.consumer());
    if (in_bulk && thread_ == 0 && half.column < args_.columns) {
      store_box(&args_.c.whole, {half.column, half.row, 0, 0}, gates);
      store_box(&args_.c.whole, {half.column, half.row, 0, 1}, ups);
      commit_stores();
    }
    // A warp continues while any of its rows is valid, because fetching weights is a warp shuffle.
#pragma unroll 2
    for (int line = thread_ / kPieces; line / 4 * 4 < half.rows; line += kLines) {
      const float weight = weights.of(half.consumer(), line);
      const PackedLine gate = load_staged(gates, line, piece);
      const PackedLine up = load_staged(ups, line, piece);
      float s[8];
      sigmoids<Act>(gate, s);
      PackedLine result;
#pragma unroll
      for (int pair = 0; pair < PackedLine::kPairs; ++pair) {
        const auto value = [&](int e) {
          return weight *
                 Act::value_of(s[2 * pair + e], gate.get(pair, e), up.get(pair, e), act.constants);
        };
        result.pairs[pair] = round_pair(value(0), value(1));
      }
      if (line < half.rows && column < args_.columns) {
        store(activated.at(half.row + line), result);
        if (keeps && !in_bulk) {
          Element* const inner = Column(act.inner, column).at(half.row + line);
          store(inner, gate);
          store(inner + args_.columns, up);
        }
      }
    }
    if (in_bulk && thread_ == 0) wait_until_stores_have_read<0>();
    arrive(shared_.drained(half.consumer()));
  }

  template <typename Act>
  __device__ __forceinline__ void sigmoids(const PackedLine& gate, float (&s)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[i] = Act::sigmoid_input(gate.get(i / 2, i % 2), args_.activations.constants);
    }
    FastMath::sigmoids(s);
  }

  // A thread's part of a row in backward: eight of 128 columns.
  struct Inputs {
    PackedLine gate;
    PackedLine up;
  };

  // In backward, 16 threads share 128 columns of a row, so the six warps cover 12 rows per step.
  static constexpr int kPieces = 16;
  static constexpr int kStep = Variant::kFinishers / kPieces;

  // Loads this thread's inputs of its first row of the half.
  __device__ __forceinline__ void load_first(const Half& half, Inputs& inputs) const {
    const int line = thread_ / kPieces;
    const int column = half.column + thread_ % kPieces * 8;
    if (line >= half.rows || column >= args_.columns) return;
    inputs = load_inputs(Column(args_.activations.inner, column).at(half.row + line));
  }

  // A thread's part of a row's dot product, to be added up over the sixteen threads of the row.
  // The next step adds it up, so that its arithmetic hides the latency.
  struct PendingDot {
    float value = 0.0F;
    int row = -1;  // in the thread that stores the sum; −1 in the others
  };
  __device__ __forceinline__ void finish(PendingDot dot, int column) const {
    const Activations& act = args_.activations;
    if (act.dots == nullptr) return;
#pragma unroll
    for (int lanes = kPieces / 2; lanes > 0; lanes /= 2) {
      dot.value += __shfl_xor_sync(~0U, dot.value, lanes);
    }
    if (dot.row < 0) return;
    act.dots[std::int64_t{dot.row} * std::int64_t{act.dot_blocks} + column / 128] = dot.value;
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
    const Column inner(act.inner, column);
    const Column activated(act.activated, column);
    // A warp continues while any of its rows is valid: its lanes exchange weights and dot products.
    const auto has_rows_of_warp = [&](int line) { return line / 2 * 2 < half.rows; };
    int line = thread_ / kPieces;
    PendingDot dot;
    const auto step = [&](const Inputs& now, Inputs& ahead) {
      const PackedLine d = load_staged(box, line, piece % 8);
      const float weight = weights.of(half.consumer(), line);
      if (!has_rows_of_warp(line + kStep)) {
        load_first(after, ahead);
      } else if (line + kStep < lines) {
        ahead = load_inputs(inner.at(half.row + line + kStep));
      }
      finish(dot, column);
      const bool is_there = line < lines;
      const int row = half.row + line;
      dot.value = line_backward<Act>(d, now, weight, is_there, inner.at(row), activated.at(row));
      dot.row = is_there && piece == 0 ? row : -1;
      line += kStep;
    };
    if (!has_rows_of_warp(line)) load_first(after, next);
    wait_until_filled(half.consumer());
    // Two steps at a time, so that inputs need not be moved between registers.
    Inputs other = {};
    while (has_rows_of_warp(line)) {
      step(next, other);
      if (!has_rows_of_warp(line)) {
        next = other;
        break;
      }
      step(other, next);
    }
    finish(dot, column);
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
    float s[8];
    sigmoids<Act>(in.gate, s);
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
        const Derivatives slopes = Act::derivatives_of(
            s[2 * pair + e], in.gate.get(pair, e), in.up.get(pair, e), args_.activations.constants);
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

  const KernelArgs& args_;
  const int rank_;
  const SharedMemory shared_;
  const int thread_;
  std::uint32_t phases_ = 0;  // one bit per consumer
};

}  // namespace switchyard::cuda::hopper
