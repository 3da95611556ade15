// SPDX-License-Identifier: Apache-2.0
// The backward pass of the router and the gate, on panels of tokens.
#include <algorithm>
#include <vector>

#include "core/given.h"
#include "core/padding.h"
#include "device/cpu/experts/panels.h"
#include "device/cpu/kernels.h"
#include "device/cpu/route/gate.h"
#include "device/cpu/route/token_router.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kGradientColumns = 64;

// True if a gradient can reach the token's logits.
bool is_routed(const RouteTokensBackward& args, std::int64_t token) {
  const auto& in = args.in;
  if (!is_valid(in.valid, token)) return false;
  if (args.slopes != nullptr && !args.slopes->is_zero()) return true;
  const auto* ids = row_of<std::int32_t>(in.expert_ids, token);
  return std::any_of(ids, ids + in.expert_ids.shape()[1], [](auto id) { return id >= 0; });
}

// Replaces a routed token's logits by their gradient. Returns false if they are not finite.
bool token_backward(const RouteTokensBackward& args, TokenRouter& router, float* logits,
                    std::int64_t token) {
  const auto& in = args.in;
  TokenRouter::Gradients gradients{.d_weights = row_of<float>(in.d_weights, token)};
  const RouterSlopes* slopes = args.slopes;
  if (slopes != nullptr && slopes->by_score) {
    gradients.d_scores = row_of<float>(*slopes->by_score, token / slopes->sequence_tokens);
    gradients.scores = slopes->scores;
  }
  const float by_square =
      slopes != nullptr && slopes->by_square ? *row_of<float>(*slopes->by_square, 0) : 0.0F;
  if (by_square != 0.0F) {
    gradients.d_probabilities = 2.0F * by_square * router.log_sum_exp(logits);
  }
  if (!router.score(logits)) return false;
  router.backward(logits, row_of<std::int32_t>(in.expert_ids, token), gradients);
  return true;
}

// Computes the gradients of the gate and its bias from d_logits [T, E].
void gate_gradients(const RouteTokensBackward& args, const ConstTensorView& d_logits,
                    const ConstTensorView& x, Workers& workers) {
  const auto& out = args.out;
  const auto num_experts = std::int64_t{args.options.num_experts};
  const auto hidden = x.shape()[1];
  const auto blocks = ceil_div(hidden, kGradientColumns);
  const bool has_bias = is_given(out.gradients.gate_bias);
  workers.run(blocks + (has_bias ? 1 : 0), [&](std::int64_t block, Scratch& scratch) {
    if (block < blocks) {
      const auto first = block * kGradientColumns;
      gate_gradient({d_logits, x, out.gradients.gate, out.mode}, first,
                    std::min(first + kGradientColumns, hidden), scratch);
      return;
    }
    float* sums = scratch.take_floats(num_experts);
    std::fill_n(sums, num_experts, 0.0F);
    element_kernels().f32.add_rows(sums, d_logits.data(), x.rows(), num_experts, num_experts,
                                   nullptr);
    write_gradient({out.gradients.gate_bias.data(),
                    out.gradients.gate_bias.dtype(),
                    {1, num_experts},
                    num_experts},
                   {0, num_experts}, sums, out.mode);
  });
}

}  // namespace

void route_tokens_backward(const RouteTokensBackward& args, Workers& workers, MemoryCache& memory) {
  const auto& in = args.in;
  const auto& out = args.out;
  const auto num_tokens = in.x.rows();
  const auto num_experts = std::int64_t{args.options.num_experts};
  const Gate gate(args.weights, memory);
  const TensorView d_logits = memory.take({num_tokens, num_experts}, Dtype::f32);
  std::vector<std::uint8_t> has_part(static_cast<std::size_t>(num_tokens));
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t panel, Scratch& scratch) {
    TokenRouter router(args.options, args.weights);
    const auto first = panel * kTokenPanelRows;
    const auto last = std::min(first + kTokenPanelRows, num_tokens);
    float* const scores = gate.logits(in.x, first, last, scratch);
    for (std::int64_t t = first; t < last; ++t) {
      float* token_scores = scores + (t - first) * num_experts;
      const bool counts = is_routed(args, t) && token_backward(args, router, token_scores, t);
      if (!counts) std::fill_n(token_scores, num_experts, 0.0F);
      has_part[static_cast<std::size_t>(t)] = counts ? 1 : 0;
      std::copy_n(token_scores, num_experts, row_of<float>(d_logits, t));
    }
    std::fill_n(scores + (last - first) * num_experts,
                (padded_tokens(last - first) - (last - first)) * num_experts, 0.0F);
    gate.add_d_x(scores, first, last, out.d_x, scratch);
  });
  const bool all_count = std::ranges::find(has_part, 0) == has_part.end();
  ConstTensorView x = in.x;
  if (!all_count) {  // the other rows of x may hold NaN, and NaN · 0 is NaN
    const TensorView counting = memory.take(x.shape(), x.dtype());
    copy_kept_rows(in.x, counting,
                   [&](std::int64_t t) { return has_part[static_cast<std::size_t>(t)] != 0; });
    x = counting;
  }
  gate_gradients(args, d_logits, x, workers);
}

}  // namespace switchyard::cpu
