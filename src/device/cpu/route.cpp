// From logits to experts and weights, and back, one token after the other.
#include "device/cpu/route.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "device/cpu/elements.h"
#include "device/cpu/gate.h"
#include "device/cpu/panels.h"

namespace switchyard::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kEpsilon = 1e-20F;
constexpr std::int64_t kGradientColumns = 64;

// Where each expert's weight comes from, for one token at a time.
class TokenRouter {
 public:
  TokenRouter(const RouterOptions& options, const RouterWeights& weights)
      : options_(options),
        group_size_(options.num_experts / options.num_groups),
        compared_(static_cast<std::size_t>(options.num_experts)),
        group_scores_(static_cast<std::size_t>(options.num_groups)) {
    for (std::int64_t e = 0; is_given(weights.score_bias) && e < options.num_experts; ++e) {
      bias_.push_back(element(weights.score_bias, e));
    }
  }

  // Logits [E] become scores; false if they are not all finite.
  bool score(float* logits) const {
    const auto& kernels = element_kernels();
    const auto n = std::int64_t{options_.num_experts};
    if (options_.score_bias == ScoreBias::logits && !bias_.empty()) {
      kernels.f32.add(reinterpret_cast<std::byte*>(logits), bias_.data(), n);
    }
    if (!kernels.all_finite(logits, n)) return false;
    (options_.score == ScoreFunction::softmax ? kernels.softmax : kernels.sigmoid)(logits, n);
    return true;
  }

  // The best K by score, ties to the lower id.
  void choose(const float* scores, std::int32_t* ids) {
    std::copy_n(scores, options_.num_experts, compared_.begin());
    if (options_.score_bias == ScoreBias::choice) {
      for (std::size_t e = 0; e < bias_.size(); ++e) compared_[e] += bias_[e];
    }
    if (options_.kept_groups < options_.num_groups) drop_groups();
    for (std::int64_t k = 0; k < options_.top_k; ++k) {
      ids[k] = static_cast<std::int32_t>(take_best(compared_.data(), options_.num_experts));
    }
  }

  // weights[k] of ids[k]; 0 for no pick.
  void weigh(const float* scores, const std::int32_t* ids, float* weights) const {
    const float factor = options_.scale / divisor(scores, ids);
    for (std::int64_t k = 0; k < options_.top_k; ++k) {
      weights[k] = ids[k] < 0 ? 0.0F : scores[ids[k]] * factor;
    }
  }

  // Scores [E] become the gradient of the logits.
  void backward(float* scores, const std::int32_t* ids, const float* d_weights) {
    const auto n = std::int64_t{options_.num_experts};
    const float total = divisor(scores, ids);
    float weighted = 0.0F;
    for (std::int64_t k = 0; k < options_.top_k; ++k) {
      if (ids[k] >= 0) weighted += d_weights[k] * scores[ids[k]];
    }
    const float shift = options_.normalise == Normalise::chosen ? weighted / total : 0.0F;
    std::ranges::fill(compared_, 0.0F);  // d_scores
    for (std::int64_t k = 0; k < options_.top_k; ++k) {
      if (ids[k] < 0) continue;
      compared_[static_cast<std::size_t>(ids[k])] +=
          options_.scale * (d_weights[k] - shift) / total;
    }
    float mean = 0.0F;
    if (options_.score == ScoreFunction::softmax) {
      for (std::int64_t k = 0; k < options_.top_k; ++k) {
        if (ids[k] < 0 || is_repeat(ids, k)) continue;
        mean += compared_[static_cast<std::size_t>(ids[k])] * scores[ids[k]];
      }
    }
    for (std::int64_t e = 0; e < n; ++e) {
      const float slope = options_.score == ScoreFunction::softmax ? 1.0F : 1.0F - scores[e];
      scores[e] = scores[e] * slope * (compared_[static_cast<std::size_t>(e)] - mean);
    }
  }

 private:
  static std::int64_t take_best(float* values, std::int64_t n) {
    const auto best = element_kernels().argmax(values, n);
    values[best] = kNone;
    return best;
  }

  static bool is_repeat(const std::int32_t* ids, std::int64_t k) {
    return std::find(ids, ids + k, ids[k]) != ids + k;
  }

  float divisor(const float* scores, const std::int32_t* ids) const {
    if (options_.normalise == Normalise::none) return 1.0F;
    float total = 0.0F;
    for (std::int64_t k = 0; k < options_.top_k; ++k) {
      if (ids[k] >= 0) total += scores[ids[k]];
    }
    return total + kEpsilon;
  }

  void drop_groups() {
    for (int g = 0; g < options_.num_groups; ++g) {
      const float* group = compared_.data() + g * group_size_;
      float best = kNone;
      float second = kNone;
      for (std::int64_t i = 0; i < group_size_; ++i) {
        second = std::max(second, std::min(best, group[i]));
        best = std::max(best, group[i]);
      }
      group_scores_[static_cast<std::size_t>(g)] = group_size_ > 1 ? best + second : best;
    }
    for (int kept = 0; kept < options_.kept_groups; ++kept) {
      take_best(group_scores_.data(), options_.num_groups);
    }
    for (int g = 0; g < options_.num_groups; ++g) {
      if (group_scores_[static_cast<std::size_t>(g)] == kNone) continue;  // taken above: kept
      std::fill_n(compared_.begin() + g * group_size_, group_size_, kNone);
    }
  }

  const RouterOptions& options_;
  std::int64_t group_size_;
  std::vector<float> bias_;
  std::vector<float> compared_;  // [E]
  std::vector<float> group_scores_;
};

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

void pick(const RouteTokens& args, TokenRouter& router, const float* scores, std::int64_t token) {
  const auto top_k = args.options.top_k;
  auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  if (args.given_ids) {
    std::copy_n(row_of<std::int32_t>(*args.given_ids, token), top_k, ids);
    const auto is_none = [&](std::int32_t id) { return id < 0 || id >= args.options.num_experts; };
    if (std::any_of(ids, ids + top_k, is_none)) {  // out of range: the plan will say so
      std::vector<std::int32_t> known(ids, ids + top_k);
      std::ranges::replace_if(known, is_none, -1);
      router.weigh(scores, known.data(), row_of<float>(args.routing_weights, token));
      return;
    }
  } else if (args.options.choice == Choice::balanced) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      ids[k] = static_cast<std::int32_t>((token * top_k + k) % args.options.num_experts);
    }
  } else {
    router.choose(scores, ids);
  }
  router.weigh(scores, ids, row_of<float>(args.routing_weights, token));
}

}  // namespace

std::int64_t route_tokens(const RouteTokens& args, Workers& workers, MemoryCache& memory) {
  const auto num_tokens = args.x.rows();
  const auto num_experts = std::int64_t{args.options.num_experts};
  const Gate gate(args.weights, memory);
  constexpr auto kNoToken = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> first_bad{kNoToken};
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t panel, Scratch& scratch) {
    TokenRouter router(args.options, args.weights);
    const auto first = panel * kTokenPanelRows;
    const auto last = std::min(first + kTokenPanelRows, num_tokens);
    float* scores = gate.logits(args.x, first, last, scratch);
    for (std::int64_t t = first; t < last; ++t, scores += num_experts) {
      if (router.score(scores)) {
        pick(args, router, scores, t);
        continue;
      }
      note_first(first_bad, t);
      std::fill_n(row_of<std::int32_t>(args.expert_ids, t), args.options.top_k, -1);
      std::fill_n(row_of<float>(args.routing_weights, t), args.options.top_k, 0.0F);
    }
  });
  return first_bad == kNoToken ? -1 : first_bad.load();
}

void route_tokens_backward(const RouteTokensBackward& args, Workers& workers, MemoryCache& memory) {
  const auto& in = args.in;
  const auto& out = args.out;
  const auto num_tokens = in.x.rows();
  const auto num_experts = std::int64_t{args.options.num_experts};
  const auto top_k = args.options.top_k;
  const Gate gate(args.weights, memory);
  const TensorView d_logits = memory.take({num_tokens, num_experts}, Dtype::f32);
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t panel, Scratch& scratch) {
    TokenRouter router(args.options, args.weights);
    const auto first = panel * kTokenPanelRows;
    const auto last = std::min(first + kTokenPanelRows, num_tokens);
    float* const scores = gate.logits(in.x, first, last, scratch);
    for (std::int64_t t = first; t < last; ++t) {
      float* token_scores = scores + (t - first) * num_experts;
      const auto* ids = row_of<std::int32_t>(in.expert_ids, t);
      const bool has_picks = std::any_of(ids, ids + top_k, [](auto id) { return id >= 0; });
      if (has_picks && router.score(token_scores)) {
        router.backward(token_scores, ids, row_of<float>(in.d_weights, t));
      } else {
        std::fill_n(token_scores, num_experts, 0.0F);
      }
      std::copy_n(token_scores, num_experts, row_of<float>(d_logits, t));
    }
    std::fill_n(scores + (last - first) * num_experts,
                (padded_tokens(last - first) - (last - first)) * num_experts, 0.0F);
    gate.add_d_x(scores, first, last, out.d_x, scratch);
  });
  const auto hidden = in.x.shape()[1];
  const auto blocks = ceil_div(hidden, kGradientColumns);
  const bool has_bias = is_given(out.gradients.gate_bias);
  workers.run(blocks + (has_bias ? 1 : 0), [&](std::int64_t block, Scratch& scratch) {
    if (block < blocks) {
      const auto first = block * kGradientColumns;
      gate_gradient({d_logits, in.x, out.gradients.gate, out.mode}, first,
                    std::min(first + kGradientColumns, hidden), scratch);
      return;
    }
    float* sums = scratch.take_floats(num_experts);
    std::fill_n(sums, num_experts, 0.0F);
    element_kernels().f32.add_rows(sums, d_logits.data(), num_tokens, num_experts, num_experts,
                                   nullptr);
    write_gradient({out.gradients.gate_bias.data(),
                    out.gradients.gate_bias.dtype(),
                    {1, num_experts},
                    num_experts},
                   {0, num_experts}, sums, out.mode);
  });
}

}  // namespace switchyard::cpu
