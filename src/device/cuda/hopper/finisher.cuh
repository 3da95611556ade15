// The warps that do with a tile's sums what is more than storing them, while the tensor cores
// are at the next tile.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/activations.cuh"
#include "device/cuda/hopper/hand_over.cuh"
#include "device/cuda/hopper/target.cuh"
#include "device/cuda/lines.cuh"

namespace switchyard::cuda::hopper {

// Half of a consumer's sums: 64 rows, and of each two boxes of 64 columns.
struct Half {
  Target target;
  int consumer;
  int index;
};

template <typename Variant>
class Finisher {
 public:
  __device__ __forceinline__ Finisher(const KernelArgs& args, int rank, SharedMemory shared)
      : args_(args),
        rank_(rank),
        shared_(shared),
        thread_(threadIdx.x - (kThreads - Variant::kFinishers)) {}

  template <typename Act>
  __device__ __forceinline__ void run() {
    TileWalk<Variant> walk(args_, rank_);
    Tile tile;
    while (walk.next(tile)) {
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
          if (!has_rows<Variant>(tile, consumer)) continue;
          const Target target = find_target<Variant>(args_, tile, consumer);
          if constexpr (Variant::kActivates) {
            activate<Act>({target, consumer, half});
          } else {
            activate_backward<Act>({target, consumer, half});
          }
          phases_ ^= 1U << consumer;
        }
      }
    }
    if (thread_ == 0) wait_for_stores();
  }

 private:
  using Element = __nv_bfloat16;

  __device__ __forceinline__ void wait_until_filled(int consumer) const {
    wait_for(shared_.filled(consumer), phases_ >> consumer & 1U);
  }

  __device__ __forceinline__ float weight_of(std::int64_t row) const {
    const Activations& act = args_.activations;
    if (act.weights == nullptr) return 1.0F;
    return act.weights[act.weight_sources != nullptr ? act.weight_sources[row] : row];
  }
  __device__ __forceinline__ static Element* element(const Rows& rows, std::int64_t row,
                                                     int column) {
    return static_cast<Element*>(const_cast<void*>(rows.data)) + row * rows.stride + column;
  }
  __device__ __forceinline__ static Line<Element> line_of(uint4 piece) {
    return reinterpret_cast<const Line<Element>&>(piece);
  }
  __device__ __forceinline__ static void store(const Rows& rows, std::int64_t row, int column,
                                               const Line<Element>& line) {
    *reinterpret_cast<uint4*>(element(rows, row, column)) = reinterpret_cast<const uint4&>(line);
  }

  // Keeps the sums, a box of the gate and one of the up projection, and stores what they activate.
  template <typename Act>
  __device__ __forceinline__ void activate(const Half& half) {
    constexpr int kPieces = 8;  // of a line
    constexpr int kLines = Variant::kFinishers / kPieces;
    const Activations& act = args_.activations;
    const std::uint32_t gates = shared_.staging(half.consumer, 0);
    const std::uint32_t ups = shared_.staging(half.consumer, 1);
    const int first_column = half.target.column + half.index * kBoxColumns;
    const bool keeps = act.hidden.data != nullptr;
    const bool in_bulk = keeps && half.target.rows >= 64;
    wait_until_filled(half.consumer);
    if (in_bulk && thread_ == 0 && first_column < args_.columns) {
      store_box(&args_.c.whole, {first_column, half.target.row, 0, 0}, gates);
      store_box(&args_.c.whole, {first_column, half.target.row, 0, 1}, ups);
      commit_stores();
    }
    const int piece = thread_ % kPieces;
    const int column = first_column + piece * 8;
    const int lines = column < args_.columns ? min(half.target.rows, 64) : 0;
#pragma unroll 2
    for (int line = thread_ / kPieces; line < lines; line += kLines) {
      const std::int64_t row = half.target.row + line;
      const float weight = weight_of(row);
      const Line<Element> gate = line_of(load_shared(piece_of_box(gates, line, piece)));
      const Line<Element> up = line_of(load_shared(piece_of_box(ups, line, piece)));
      Line<Element> result;
#pragma unroll
      for (int e = 0; e < Line<Element>::kElements; ++e) {
        result.set(e, weight * Act::value(gate.get(e), up.get(e), act.limit));
      }
      store(act.activated, row, column, result);
      if (!keeps || in_bulk) continue;
      store(act.hidden, row, column, gate);
      store(act.hidden, row, args_.columns + column, up);
    }
    if (in_bulk && thread_ == 0) wait_until_stores_have_read<0>();
    arrive(shared_.drained(half.consumer));
  }

  // What a thread has of a row in the backward: eight columns of 128.
  struct Inputs {
    Line<Element> gate;
    Line<Element> up;
    float weight;
  };

  // The sums are the gradient of what was activated, before its weight. A warp has two rows at a
  // time, and the next ones' inputs on their way.
  template <typename Act>
  __device__ __forceinline__ void activate_backward(const Half& half) {
    constexpr int kPieces = 16;  // of a row's 128 columns
    constexpr int kStep = Variant::kFinishers / kPieces;
    const int piece = thread_ % kPieces;
    const int first_column = half.target.column + half.index * 2 * kBoxColumns;
    const int column = first_column + piece * 8;
    const int lines = min(half.target.rows, 64);
    const auto has = [&](int line) { return line < lines && column < args_.columns; };
    fetch(half.target.row, lines, first_column);
    Inputs next{};
    int line = thread_ / kPieces;
    if (has(line)) next = load_inputs(half.target.row + line, column);
    wait_until_filled(half.consumer);
    const std::uint32_t box = shared_.staging(half.consumer, piece / 8);
    // Both rows of a warp, as long as there is one: their sums are made together.
    for (; line / 2 * 2 < lines; line += kStep) {
      const Inputs now = next;
      if (has(line + kStep)) next = load_inputs(half.target.row + line + kStep, column);
      float dot = 0.0F;
      if (has(line)) {
        const Line<Element> d = line_of(load_shared(piece_of_box(box, line, piece % 8)));
        dot = line_backward<Act>(half.target.row + line, column, d, now);
      }
      store_dot(half, line, column, piece, dot);
    }
    arrive(shared_.drained(half.consumer));
  }

  // Brings what is about to be read, four lines of the cache of every row, nearer.
  __device__ __forceinline__ void fetch(std::int64_t first_row, int rows, int first_column) const {
    for (int i = thread_; i < 4 * rows; i += Variant::kFinishers) {
      const int column = first_column + i % 2 * kBoxColumns;
      const int part = i / 2 % 2 * args_.columns;
      if (column >= args_.columns) continue;
      fetch_to_cache(element(args_.activations.hidden, first_row + i / 4, part + column));
    }
  }

  __device__ __forceinline__ Inputs load_inputs(std::int64_t row, int column) const {
    const auto load = [&](int at) {
      const Element* const from = element(args_.activations.hidden, row, at);
      return line_of(__ldcs(reinterpret_cast<const uint4*>(from)));
    };
    return {load(column), load(args_.columns + column), weight_of(row)};
  }

  // As activate_backward of expert_passes.h does it; returns this line's part of ⟨d, activation⟩.
  template <typename Act>
  __device__ __forceinline__ float line_backward(std::int64_t row, int column,
                                                 const Line<Element>& d, const Inputs& in) const {
    const Activations& act = args_.activations;
    Line<Element> gate;
    Line<Element> up;
    Line<Element> activated;
    float dot = 0.0F;
#pragma unroll
    for (int e = 0; e < Line<Element>::kElements; ++e) {
      const float d_value = d.get(e);
      const Derivatives slopes = Act::derivatives(in.gate.get(e), in.up.get(e), act.limit);
      dot += d_value * slopes.value;
      activated.set(e, in.weight * slopes.value);
      gate.set(e, in.weight * d_value * slopes.d_gate);
      up.set(e, in.weight * d_value * slopes.d_up);
    }
    store(act.activated, row, column, activated);
    store(act.hidden, row, column, gate);
    store(act.hidden, row, args_.columns + column, up);
    return dot;
  }

  // Of 128 columns, by the sixteen threads that have them.
  __device__ __forceinline__ void store_dot(const Half& half, int line, int column, int piece,
                                            float dot) const {
    const Activations& act = args_.activations;
    if (act.dots == nullptr) return;
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(~0U, dot, lanes);
    if (piece != 0 || line >= half.target.rows || column >= args_.columns) return;
    act.dots[(half.target.row + line) * static_cast<std::int64_t>(act.dot_blocks) + column / 128] =
        dot;
  }

  const KernelArgs& args_;
  const int rank_;
  const SharedMemory shared_;
  const int thread_;
  std::uint32_t phases_ = 0;  // a bit for each consumer
};

}  // namespace switchyard::cuda::hopper
