// SPDX-License-Identifier: Apache-2.0
// Variants and arguments of the Hopper grouped GEMM kernels.
#pragma once

#include <cstdint>

#include "device/activation_constants.h"
#include "device/cuda/hopper/tensor_maps.h"

namespace switchyard::cuda::hopper {

// The products of grouped_gemm.h. transposed_weight_gradient computes tiles of Cᵀ.
enum class Product { forward, input_gradient, weight_gradient, transposed_weight_gradient };

// Where A comes from: a matrix of consecutive rows, or tokens from which rows are gathered.
enum class Source { rows, tokens };

// How accumulators are written out.
enum class Epilogue {
  deferred,           // rounded, then stored during the first k blocks of the next tile
  direct,             // stored at once from registers: slower, but can accumulate or write f32
  activate,           // activation of gate and up projections, by finisher warps
  activate_backward,  // gradient of the activation, by finisher warps
};

// A tile of c is 128 × 256; the reduction advances in blocks of 64.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kBlock = 64;

constexpr int kConsumers = 2;  // warpgroups; each computes 64 rows of the tile
constexpr int kWarpgroup = 128;

// Compile-time configuration of one kernel.
template <Product kTheProduct, Source kTheSource, Epilogue kTheEpilogue>
struct Variant {
  static constexpr Product kProduct = kTheProduct;
  static constexpr Epilogue kEpilogue = kTheEpilogue;
  static constexpr bool kIsTransposed = kProduct == Product::transposed_weight_gradient;
  static constexpr bool kIsWeightGradient = kProduct == Product::weight_gradient || kIsTransposed;
  static constexpr bool kReadsTokens = kTheSource == Source::tokens;
  static constexpr bool kActivates = kEpilogue == Epilogue::activate;
  static constexpr bool kHasFinisher = kActivates || kEpilogue == Epilogue::activate_backward;

  // Behind the consumers come the threads that produce, then those that run the finisher, if there
  // is one. All producing threads read tokens; without tokens, one warp does all the work.
  static constexpr int kProducers = kActivates ? 32 : kHasFinisher ? 64 : kWarpgroup;
  static constexpr int kFinishers = kActivates ? 96 : kHasFinisher ? 192 : 0;
  static constexpr int kThreads = kConsumers * kWarpgroup + kProducers + kFinishers;
  // The finisher of a gradient moves three times the bytes of the activation's, so it has twice the
  // warps. Then registers are short: wgmma, which names all its accumulators, works on half the
  // columns at a time.
  static constexpr bool kMultipliesHalves = kThreads > 3 * kWarpgroup;
  // Tiles come from a queue, see tile_queue.cuh. Weight gradients from tokens were 3–5% slower with
  // it: all their producing threads copy, and the others wait while one warp announces a tile.
  static constexpr bool kQueuesTiles = !(kIsWeightGradient && kReadsTokens);
  // The warps that work on tiles: without tokens, one warp produces.
  static constexpr int kTileWarps =
      (kConsumers * kWarpgroup + (kReadsTokens ? kProducers : 32) + kFinishers) / 32;
  // A consumer thread holds 128 accumulators, and up to 64 rounded pairs of the previous tile (32
  // with a finisher).
  static constexpr int kConsumerRegisters = kMultipliesHalves ? 176
                                            : kActivates      ? 184
                                            : kReadsTokens    ? 216
                                                              : 232;
  static constexpr int kOtherRegisters = kMultipliesHalves ? 80
                                         : kActivates      ? 136
                                         : kReadsTokens    ? 72
                                                           : 40;
  // Warpgroups can only share out the registers that the launch gave their block. A block that
  // asked for more would wait forever.
  static constexpr int kWarpgroups = kThreads / kWarpgroup;
  static_assert(kConsumers * kConsumerRegisters + (kWarpgroups - kConsumers) * kOtherRegisters <=
                kWarpgroups * (65536 / kThreads / 8 * 8));
  // An activating tile covers 128 columns of the gate projection and the same 128 of the up
  // projection.
  static constexpr int kColumnsOfPart = kActivates ? kTileColumns / 2 : kTileColumns;
};

// Divides numbers below 2³¹ by a divisor fixed on the host, with a multiplication and a shift.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(std::uint32_t by) {
    while ((std::uint64_t{1} << shift_) < by) ++shift_;
    shift_ += 31;
    multiplier_ = static_cast<std::uint32_t>((std::uint64_t{1} << shift_) / by + 1);
  }
#if defined(__CUDACC__)
  __host__ __device__
#endif
      std::uint32_t
      divide(std::uint32_t number) const {
    return static_cast<std::uint32_t>(std::uint64_t{number} * multiplier_ >> shift_);
  }

 private:
  std::uint32_t multiplier_ = 0;
  std::uint32_t shift_ = 0;
};

// Tokens from which rows of A are gathered: row r is token sources[r] / top_k.
struct Tokens {
  const void* data = nullptr;
  std::uint32_t stride = 0;               // in bytes
  int columns = 0;                        // columns of A
  const std::int32_t* sources = nullptr;  // [R]
  Divisor top_k;
};

// Inputs and outputs of the finisher.
struct Activations {
  Rows inner;  // null data: not kept
  Rows activated;
  RowNumbers<const float> weights;  // null data: all 1
  float* dots = nullptr;            // out [R, dot_blocks]: partial d_weights, one per 128 columns
  int dot_blocks = 0;
  bool is_clamped = false;
  ActivationConstants constants;
};

// No k block spans two parts. No tile does either, except that an activating tile pairs a gate with
// its up projection.
struct KernelArgs {
  // Forward: [R, K]; input gradient: [parts, R, K]; weight gradient: [parts, R, M]. Unused if A is
  // gathered from tokens.
  CUtensorMap a{};
  // The weight matrices. Weight gradient: [R, N]; transposed weight gradient: [parts, R, N].
  MatrixMaps b;
  MatrixMaps c;  // [parts, R, N], or the matrices of a weight gradient; unused by direct epilogues
  Tokens tokens;
  const std::int32_t* row_offsets = nullptr;
  const std::int32_t* group_rows = nullptr;
  std::int32_t* tickets = nullptr;            // see Groups
  const std::int32_t* group_order = nullptr;  // likewise
  int groups = 0;
  int part_blocks = 0;    // column tiles, k blocks or row tiles per part, by product
  int column_blocks = 0;  // column tiles of all parts
  int row_blocks = 0;     // row tiles of all parts; weight gradients only
  int k_blocks = 0;       // k blocks of all parts; unused by weight gradients
  int rows = 0;           // M; weight gradients only
  int columns = 0;        // N
  Rows c_rows;            // unused by weight gradients
  const MatrixRef* c_matrices = nullptr;  // direct weight gradients only
  bool c_is_f32 = false;                  // this and the next two: direct epilogues only
  bool c_has_pairs = true;                // see has_pairs()
  bool accumulate = false;
  const MatrixRef* bias = nullptr;  // [parts · groups] or null; forward only
  RowNumbers<const float> bias_factors;
  Activations activations;
};

}  // namespace switchyard::cuda::hopper
