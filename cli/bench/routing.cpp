// SPDX-License-Identifier: Apache-2.0
#include "bench/routing.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace switchyard::cli {
namespace {

// Returns the relative probability of drawing each expert.
std::vector<double> expert_weights(const RoutingOptions& options, std::mt19937_64& random) {
  std::vector<double> weights(static_cast<std::size_t>(options.num_experts), 1.0);
  if (options.kind == RoutingKind::zipf) {
    for (std::size_t e = 0; e < weights.size(); ++e) weights[e] = 1.0 / static_cast<double>(e + 1);
    std::shuffle(weights.begin(), weights.end(), random);
  }
  return weights;
}

void draw_token(const RoutingOptions& options, std::span<const double> cumulative,
                std::mt19937_64& random, std::span<std::int32_t> picks) {
  std::uniform_real_distribution<double> uniform(0.0, cumulative.back());
  std::size_t chosen = 0;
  if (options.kind == RoutingKind::one_expert) picks[chosen++] = 0;
  while (chosen < picks.size()) {
    const auto at = std::ranges::upper_bound(cumulative, uniform(random)) - cumulative.begin();
    const auto expert =
        static_cast<std::int32_t>(std::min<std::ptrdiff_t>(at, options.num_experts - 1));
    const auto before = picks.first(chosen);
    if (std::ranges::find(before, expert) == before.end()) picks[chosen++] = expert;
  }
}

}  // namespace

Tensor make_routing(const RoutingOptions& options) {
  Tensor ids({options.num_tokens, options.top_k}, Dtype::i32);
  const auto all = ids.span<std::int32_t>();
  if (options.kind == RoutingKind::balanced) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(options.num_experts));
    }
    return ids;
  }
  std::mt19937_64 random(options.seed);
  const auto weights = expert_weights(options, random);
  std::vector<double> cumulative(weights.size());
  std::partial_sum(weights.begin(), weights.end(), cumulative.begin());
  const auto top_k = static_cast<std::size_t>(options.top_k);
  for (std::size_t t = 0; t < static_cast<std::size_t>(options.num_tokens); ++t) {
    draw_token(options, cumulative, random, all.subspan(t * top_k, top_k));
  }
  return ids;
}

Tensor make_local_routing(const Communicator& comm, const RoutingOptions& options) {
  const Tensor all = make_routing(options);
  const auto first = options.num_tokens * comm.rank() / comm.size();
  const auto last = options.num_tokens * (comm.rank() + 1) / comm.size();
  const auto mine = all.view().slice(first, last);
  return Tensor::from<std::int32_t>(mine.shape(), mine.span<std::int32_t>());
}

}  // namespace switchyard::cli
