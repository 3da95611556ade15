// Reductions in rank order, so that no backend decides the order of a sum.
#include "comm/reduce.h"

#include <algorithm>
#include <type_traits>

#include "core/require.h"

namespace switchyard {
namespace {

template <typename T>
auto load(T value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <typename T, typename A>
T store(A value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return to_bfloat16(value);
  } else {
    return value;
  }
}

template <typename A>
A apply(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::sum:
      if constexpr (std::is_integral_v<A>) {
        using Unsigned = std::make_unsigned_t<A>;  // wraps instead of being undefined
        return static_cast<A>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
      } else {
        return a + b;
      }
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
  }
  throw InternalError("unknown ReduceOp");
}

template <typename T>
void reduce(const ConstTensorView& pieces, const TensorView& result, ReduceOp op) {
  const auto in = pieces.span<T>();
  const auto out = result.span<T>();
  const auto num_pieces = static_cast<std::size_t>(pieces.rows());
  const std::size_t n = out.size();
  for (std::size_t i = 0; i < n; ++i) {
    auto total = load(in[i]);
    for (std::size_t p = 1; p < num_pieces; ++p) total = apply(op, total, load(in[p * n + i]));
    out[i] = store<T>(total);
  }
}

}  // namespace

void reduce_in_rank_order(const ConstTensorView& pieces, const TensorView& result, ReduceOp op) {
  switch (pieces.dtype()) {
    case Dtype::f32:
      return reduce<float>(pieces, result, op);
    case Dtype::bf16:
      return reduce<Bfloat16>(pieces, result, op);
    case Dtype::i32:
      return reduce<std::int32_t>(pieces, result, op);
    case Dtype::i64:
      return reduce<std::int64_t>(pieces, result, op);
  }
}

}  // namespace switchyard
