// What the grouped GEMM kernels of Hopper are told, and which kernels there are.
#pragma once

#include <cstdint>

#include "device/activation_constants.h"
#include "device/cuda/hopper/tensor_maps.h"

namespace switchyard::cuda::hopper {

// The products of grouped_gemm.h. A tile of a transposed weight gradient is one of Cᵀ.
enum class Product { forward, input_gradient, weight_gradient, transposed_weight_gradient };

// Where A comes from: rows that lie one after the other, or tokens that rows are read from.
enum class Source { rows, tokens };

// How sums leave.
enum class Epilogue {
  deferred,           // rounded, and stored behind the next tile's first products
  direct,             // at once from registers, slower, for what is more than rounding
  activate,           // of a gate and an up projection: by warps of their own, and so are
  activate_backward,  // the gradients that an activation hands on
};

// A tile of c is 128 × 256; the reduction goes in blocks of 64.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kBlock = 64;

constexpr int kConsumers = 2;  // warpgroups, of 64 rows of the tile each
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;

// One kernel.
template <Product kTheProduct, Source kTheSource, Epilogue kTheEpilogue>
struct Variant {
  static constexpr Product kProduct = kTheProduct;
  static constexpr Epilogue kEpilogue = kTheEpilogue;
  static constexpr bool kIsTransposed = kProduct == Product::transposed_weight_gradient;
  static constexpr bool kIsWeightGradient = kProduct == Product::weight_gradient || kIsTransposed;
  static constexpr bool kReadsTokens = kTheSource == Source::tokens;
  static constexpr bool kActivates = kEpilogue == Epilogue::activate;
  static constexpr bool kHasFinisher = kActivates || kEpilogue == Epilogue::activate_backward;

  // Of the third warpgroup the first warp produces; the others finish, where sums are more than
  // stored, or else produce too, where that takes more than one thread.
  static constexpr int kReaders = kHasFinisher ? 32 : kWarpgroup;
  static constexpr int kFinishers = kWarpgroup - 32;
  // A consumer holds 128 sums, and of the tile before 64 pairs, or half of them.
  static constexpr int kConsumerRegisters = kHasFinisher ? 184 : kReadsTokens ? 216 : 232;
  static constexpr int kOtherRegisters = kHasFinisher ? 136 : kReadsTokens ? 72 : 40;
  // A tile that activates has 128 columns of the gate, and the same of the up projection.
  static constexpr int kColumnsOfPart = kActivates ? kTileColumns / 2 : kTileColumns;
};

// Division by a number that the host knows, of numbers below 2³¹.
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

// Tokens that rows of A are read from.
struct Tokens {
  const void* data = nullptr;
  std::uint32_t stride = 0;               // in bytes
  int columns = 0;                        // of A
  const std::int32_t* sources = nullptr;  // [R]
  Divisor top_k;
};

// What a finisher works on.
struct Activations {
  Rows inner;  // no data: not kept
  Rows activated;
  const float* weights = nullptr;  // by row, or by source; none: 1
  const std::int32_t* weight_sources = nullptr;
  float* dots = nullptr;  // out [R, dot_blocks]: a row's part of d_weights in 128 columns each
  int dot_blocks = 0;
  bool is_clamped = false;
  ActivationConstants constants;
};

// Parts do not share a tile, except a gate and an up projection that are activated, nor a block of
// the reduction.
struct KernelArgs {
  // forward [R, K], input gradient [parts, R, K], weight gradient [parts, R, M]; not for tokens
  CUtensorMap a{};
  MatrixMaps b;  // the matrices; weight gradient [R, N], transposed [parts, R, N]
  MatrixMaps c;  // [parts, R, N], or the matrices; not for direct epilogues
  Tokens tokens;
  const std::int32_t* row_offsets = nullptr;
  const std::int32_t* group_rows = nullptr;
  const std::int32_t* group_order = nullptr;  // [groups]: which comes first; none: as they are
  int groups = 0;
  int part_blocks = 0;    // a part's column tiles, blocks of the reduction, or row tiles
  int column_blocks = 0;  // column tiles of all parts
  int row_blocks = 0;     // row tiles of all parts; weight gradients alone
  int k_blocks = 0;       // of all parts; not for weight gradients
  int rows = 0;           // M; weight gradients alone
  int columns = 0;        // N
  Rows c_rows;            // not for weight gradients
  const MatrixRef* c_matrices = nullptr;  // direct weight gradients alone
  bool c_is_f32 = false;                  // direct epilogues alone, as what follows
  bool c_has_pairs = true;                // as has_pairs
  bool accumulate = false;
  const MatrixRef* bias = nullptr;
  const float* bias_factors = nullptr;
  Activations activations;
};

}  // namespace switchyard::cuda::hopper
