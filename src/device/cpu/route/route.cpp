// Panels of tokens through the gate and the router, and back.
#include "device/cpu/route/route.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/padding.h"
#include "device/cpu/experts/panels.h"
#include "device/cpu/route/gate.h"
#include "device/cpu/route/route_sums.h"
#include "device/cpu/route/token_router.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kGradientColumns = 64;

void note_first(std::atomic<std::int64_t>& first, std::int64_t token) {
  auto known = first.load();
  while (token < known && !first.compare_exchange_weak(known, token)) {
  }
}

template <typename T>
T* row_of(const TensorView& table, std::int64_t row) {
  return reinterpret_cast<T*>(table.row(row));
}
template <typename T>
const T* row_of(const ConstTensorView& table, std::int64_t row) {
  return reinterpret_cast<const T*>(table.row(row));
}

bool is_valid(const std::optional<ConstTensorView>& valid, std::int64_t token) {
  return !valid || switchyard::is_valid(*valid, token);
}

bool is_expert(const RouterOptions& options, std::int32_t id) {
  return 0 <= id && id < options.num_experts;
}

// Whether pick k of a replay is none that a plan takes: out of range, or picked before.
bool is_bad(const RouterOptions& options, const std::int32_t* ids, std::int64_t k) {
  if (ids[k] == -1) return false;
  return !is_expert(options, ids[k]) || std::find(ids, ids + k, ids[k]) != ids + k;
}

// Returns whether there were any.
bool make_bad_ids_none(const RouterOptions& options, std::int32_t* ids) {
  bool any = false;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (!is_bad(options, ids, k)) continue;
    ids[k] = -1;
    any = true;
  }
  return any;
}

// Weighs what is out of range as no pick: the plan will say so.
void weigh(const RouteTokens& args, const TokenRouter& router, const float* scores,
           std::int64_t token) {
  const auto top_k = args.options.top_k;
  const auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  auto* weights = row_of<float>(args.routing_weights, token);
  const auto is_none = [&](std::int32_t id) { return !is_expert(args.options, id); };
  if (std::none_of(ids, ids + top_k, is_none)) return router.weigh(scores, ids, weights);
  std::vector<std::int32_t> known(ids, ids + top_k);
  std::ranges::replace_if(known, is_none, -1);
  router.weigh(scores, known.data(), weights);
}

// The first tokens that something was wrong with.
struct FirstTokens {
  static constexpr auto kNone = std::numeric_limits<std::int64_t>::max();

  std::atomic<std::int64_t> non_finite{kNone};
  std::atomic<std::int64_t> bad_ids{kNone};
};

void pick(const RouteTokens& args, TokenRouter& router, const float* scores, std::int64_t token,
          FirstTokens& first) {
  const auto top_k = args.options.top_k;
  auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  if (args.in.expert_ids) {
    std::copy_n(row_of<std::int32_t>(*args.in.expert_ids, token), top_k, ids);
    const bool become_none = args.in.bad_ids == BadIds::become_none;
    if (become_none && make_bad_ids_none(args.options, ids)) note_first(first.bad_ids, token);
    return weigh(args, router, scores, token);
  }
  if (args.options.choice == Choice::balanced) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      ids[k] = static_cast<std::int32_t>((token * top_k + k) % args.options.num_experts);
    }
  } else {
    router.choose(scores, ids);
  }
  router.weigh(scores, ids, row_of<float>(args.routing_weights, token));
}

void pick_none(const RouteTokens& args, std::int64_t token) {
  std::fill_n(row_of<std::int32_t>(args.expert_ids, token), args.options.top_k, -1);
  std::fill_n(row_of<float>(args.routing_weights, token), args.options.top_k, 0.0F);
}

void write_problems(const RouteTokens& args, const FirstTokens& first) {
  const auto words = args.problems.span<std::int64_t>();
  std::ranges::fill(words, 0);
  words[kNonFiniteToken] = first.non_finite == FirstTokens::kNone ? -1 : first.non_finite.load();
  words[kBadToken] = first.bad_ids == FirstTokens::kNone ? -1 : first.bad_ids.load();
  if (words[kBadToken] < 0) return;
  const auto* ids = row_of<std::int32_t>(*args.in.expert_ids, words[kBadToken]);
  std::int64_t k = 0;
  while (!is_bad(args.options, ids, k)) ++k;
  words[kBadK] = k;
  words[kBadId] = ids[k];
  words[kBadIsDuplicate] = is_expert(args.options, ids[k]) ? 1 : 0;
}

// Whether any gradient can reach a token's logits.
bool is_routed(const RouteTokensBackward& args, std::int64_t token) {
  const auto& in = args.in;
  if (!is_valid(in.valid, token)) return false;
  if (args.slopes != nullptr && !args.slopes->is_zero()) return true;
  const auto* ids = row_of<std::int32_t>(in.expert_ids, token);
  return std::any_of(ids, ids + in.expert_ids.shape()[1], [](auto id) { return id >= 0; });
}

// Logits of a token that has a part become their gradient; false if they are not finite.
bool token_backward(const RouteTokensBackward& args, TokenRouter& router, float* logits,
                    std::int64_t token) {
  TokenRouter::Gradients gradients{.d_weights = row_of<float>(args.in.d_weights, token)};
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
  router.backward(logits, row_of<std::int32_t>(args.in.expert_ids, token), gradients);
  return true;
}

// Of the gate and of its bias, from d_logits [T, E].
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

void route_tokens(const RouteTokens& args, Workers& workers, MemoryCache& memory) {
  const ConstTensorView& x = args.in.x;
  const auto num_tokens = x.rows();
  const auto num_experts = std::int64_t{args.options.num_experts};
  const Gate gate(args.weights, memory);
  FirstTokens first_tokens;
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t panel, Scratch& scratch) {
    TokenRouter router(args.options, args.weights);
    const auto first = panel * kTokenPanelRows;
    const auto last = std::min(first + kTokenPanelRows, num_tokens);
    float* scores = gate.logits(x, first, last, scratch);
    PanelSums sums(args.sums, args.options.top_k);
    for (std::int64_t t = first; t < last; ++t, scores += num_experts) {
      if (!is_valid(args.in.valid, t)) {
        pick_none(args, t);
        continue;
      }
      const float log_sum_exp = sums.wants_squares() ? router.log_sum_exp(scores) : 0.0F;
      if (!router.score(scores)) {
        note_first(first_tokens.non_finite, t);
        pick_none(args, t);
        continue;
      }
      pick(args, router, scores, t, first_tokens);
      sums.add(t, row_of<std::int32_t>(args.expert_ids, t), scores, log_sum_exp);
    }
  });
  write_problems(args, first_tokens);
}

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
  if (!all_count) {  // what x holds elsewhere may be NaN, and that times zero is NaN
    const TensorView counting = memory.take(x.shape(), x.dtype());
    copy_kept_rows(in.x, counting,
                   [&](std::int64_t t) { return has_part[static_cast<std::size_t>(t)] != 0; });
    x = counting;
  }
  gate_gradients(args, d_logits, x, workers);
}

}  // namespace switchyard::cpu
