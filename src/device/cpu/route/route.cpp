// SPDX-License-Identifier: Apache-2.0
// Runs panels of tokens through the gate and the router.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "device/cpu/experts/panels.h"
#include "device/cpu/kernels.h"
#include "device/cpu/route/gate.h"
#include "device/cpu/route/token_router.h"

namespace switchyard::cpu {
namespace {

void note_first(std::atomic<std::int64_t>& first, std::int64_t token) {
  auto known = first.load();
  while (token < known && !first.compare_exchange_weak(known, token)) {
  }
}

bool is_expert(const RouterOptions& options, std::int32_t id) {
  return 0 <= id && id < options.num_experts;
}

// True if a plan would reject pick k of a replay: it is out of range or picked before.
bool is_bad(const RouterOptions& options, const std::int32_t* ids, std::int64_t k) {
  if (ids[k] == -1) return false;
  return !is_expert(options, ids[k]) || std::find(ids, ids + k, ids[k]) != ids + k;
}

// Sets bad ids to −1. Returns true if there were any.
bool make_bad_ids_none(const RouterOptions& options, std::int32_t* ids) {
  bool any = false;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (!is_bad(options, ids, k)) continue;
    ids[k] = -1;
    any = true;
  }
  return any;
}

// Computes a token's weights. Ids out of range count as no pick here; the plan reports them.
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

// The first token with each kind of problem.
struct FirstTokens {
  static constexpr auto kNone = std::numeric_limits<std::int64_t>::max();

  std::atomic<std::int64_t> non_finite{kNone};
  std::atomic<std::int64_t> bad_ids{kNone};
};

// Copies a token's ids of a replay.
void copy_ids(const RouteTokens& args, std::int64_t token, FirstTokens& first) {
  auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  std::copy_n(row_of<std::int32_t>(*args.in.expert_ids, token), args.options.top_k, ids);
  const bool become_none = args.in.bad_ids == BadIds::become_none;
  if (become_none && make_bad_ids_none(args.options, ids)) note_first(first.bad_ids, token);
}

// Copies the weights that were given for a token's ids.
void copy_weights(const RouteTokens& args, std::int64_t token) {
  const auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  const auto* given = row_of<float>(*args.given_weights, token);
  auto* weights = row_of<float>(args.routing_weights, token);
  for (std::int64_t k = 0; k < args.options.top_k; ++k) {
    weights[k] = is_expert(args.options, ids[k]) ? given[k] : 0.0F;
  }
}

void pick(const RouteTokens& args, TokenRouter& router, const float* scores, std::int64_t token,
          FirstTokens& first) {
  const auto top_k = args.options.top_k;
  auto* ids = row_of<std::int32_t>(args.expert_ids, token);
  if (args.in.expert_ids) {
    copy_ids(args, token, first);
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

// Sums up a panel's tokens locally and then adds the result atomically to the sums for losses and
// statistics, which several threads share.
class PanelSums {
 public:
  // If `sums` is null, nothing is collected.
  PanelSums(const RouterSums* sums, std::int64_t top_k) : sums_(sums), top_k_(top_k) {
    if (sums != nullptr) row_.resize(static_cast<std::size_t>(2 * sums->num_experts + 1));
  }
  ~PanelSums() { flush(); }
  PanelSums(const PanelSums&) = delete;
  PanelSums& operator=(const PanelSums&) = delete;

  bool wants_squares() const { return sums_ != nullptr && sums_->wants_squares(); }

  // Adds a token with picks ids [K] and scores [E] to the sums. The z-loss needs log_sum_exp, so it
  // is read only if wants_squares().
  void add(std::int64_t token, const std::int32_t* ids, const float* scores, float log_sum_exp) {
    if (sums_ == nullptr) return;
    const auto sequence = token / sums_->sequence_tokens;
    if (sequence != sequence_) flush();
    sequence_ = sequence;
    for (std::int64_t k = 0; k < top_k_; ++k) {
      if (0 <= ids[k] && ids[k] < sums_->num_experts) ++row_[static_cast<std::size_t>(ids[k])];
    }
    ++row_.back();
    if (sums_->wants_scores()) add_scores(scores);
    if (!wants_squares()) return;
    const double square = std::min(double{log_sum_exp} * log_sum_exp, RouterSums::kMostSquare);
    const double whole = std::floor(square);
    whole_ += static_cast<std::int64_t>(whole);
    fraction_ += static_cast<std::int64_t>((square - whole) / RouterSums::kUnit);
  }

 private:
  void add_scores(const float* scores) {
    const auto n = static_cast<std::size_t>(sums_->num_experts);
    double unit = RouterSums::kUnit;
    if (sums_->losses.scores == LossScores::shares) {
      unit *= std::accumulate(scores, scores + n, 1e-20F);
    }
    for (std::size_t e = 0; e < n; ++e) {
      row_[n + e] += static_cast<std::int64_t>(double{scores[e]} / unit);
    }
  }

  void flush() {
    if (sums_ == nullptr || row_.back() == 0) return;
    const auto row = sums_->by_sequence.slice(sequence_, sequence_ + 1).span<std::int64_t>();
    for (std::size_t i = 0; i < row_.size(); ++i) add_to(row[i], row_[i]);
    std::ranges::fill(row_, 0);
    const auto squares = sums_->squares.span<std::int64_t>();
    add_to(squares[0], std::exchange(whole_, 0));
    add_to(squares[1], std::exchange(fraction_, 0));
  }

  static void add_to(std::int64_t& sum, std::int64_t value) {
    if (value != 0) std::atomic_ref(sum).fetch_add(value, std::memory_order_relaxed);
  }

  const RouterSums* sums_;
  std::int64_t top_k_;
  std::int64_t sequence_ = 0;
  std::vector<std::int64_t> row_;  // like a row of by_sequence
  std::int64_t whole_ = 0;
  std::int64_t fraction_ = 0;
};

void take_given(const RouteTokens& args, Workers& workers) {
  const auto num_tokens = args.in.x.rows();
  FirstTokens first_tokens;
  workers.run(ceil_div(num_tokens, kTokenPanelRows), [&](std::int64_t panel, Scratch& /*scratch*/) {
    const auto first = panel * kTokenPanelRows;
    const auto last = std::min(first + kTokenPanelRows, num_tokens);
    PanelSums sums(args.sums, args.options.top_k);
    for (std::int64_t t = first; t < last; ++t) {
      if (!is_valid(args.in.valid, t)) {
        pick_none(args, t);
        continue;
      }
      copy_ids(args, t, first_tokens);
      copy_weights(args, t);
      sums.add(t, row_of<std::int32_t>(args.expert_ids, t), nullptr, 0.0F);
    }
  });
  write_problems(args, first_tokens);
}

}  // namespace

void route_tokens(const RouteTokens& args, Workers& workers, MemoryCache& memory) {
  if (args.given_weights) return take_given(args, workers);
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

}  // namespace switchyard::cpu
