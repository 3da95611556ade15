// Builds routes: one pass over the assignments, one exchange of slots.
#include "moe/packed_route.h"

#include <algorithm>
#include <numeric>

#include "core/require.h"
#include "moe/plan_data.h"

namespace switchyard {
namespace {

using Indices = std::span<std::int32_t>;

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::vector<std::int64_t> exclusive_sums(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), std::int64_t{0});
  return offsets;
}

Tensor no_indices(std::int64_t rows, std::int64_t columns) {
  Tensor result({rows, columns}, Dtype::i32);
  std::ranges::fill(result.span<std::int32_t>(), -1);
  return result;
}

// A token's stay at one rank: its position among the sent, and how many slots it has there so far.
struct Visit {
  std::int64_t token = -1;
  std::int64_t position = 0;
  std::int64_t num_slots = 0;
};

class RouteBuilder {
 public:
  RouteBuilder(const Plan::Data& plan, PackedRoute& route)
      : plan_(plan),
        route_(route),
        visits_(route.sent_tokens.size()),
        next_position_(exclusive_sums(route.sent_tokens)),
        next_home_(exclusive_sums(route.home_rows)),
        sent_slots_(no_indices(route.num_sent(), route.width)) {
    route.send_positions = no_indices(plan.num_tokens, plan.top_k);
    route.send_entries = no_indices(plan.num_tokens, plan.top_k);
    route.local_slots = no_indices(plan.num_tokens, plan.top_k);
    route.home_slots = no_indices(plan.num_tokens, plan.top_k);
    route.home_buffers = Tensor::zeros({plan.num_tokens, plan.top_k}, Dtype::i32);
    route.partial_slots = no_indices(plan.num_tokens, plan.top_k);
    route.partial_buffers = Tensor::zeros({plan.num_tokens, plan.top_k}, Dtype::i32);
  }

  // Returns the slots [S, W] for the owners.
  Tensor build() {
    for (std::int64_t t = 0; t < plan_.num_tokens; ++t) {
      stops_.clear();
      for (std::int64_t k = 0; k < plan_.top_k; ++k) add_assignment(t, t * plan_.top_k + k);
      add_stops(t);
    }
    return std::move(sent_slots_);
  }

 private:
  static std::int32_t& at(Tensor& tensor, std::int64_t index) {
    return tensor.span<std::int32_t>()[static_cast<std::size_t>(index)];
  }

  void add_assignment(std::int64_t token, std::int64_t assignment) {
    const auto i = static_cast<std::size_t>(assignment);
    const std::int32_t target = plan_.target_ranks.span<std::int32_t>()[i];
    const std::int32_t slot = plan_.slots.span<std::int32_t>()[i];
    if (target < 0) return;
    const auto r = static_cast<std::size_t>(target);
    Visit& visit = visits_[r];
    if (visit.token != token) {
      visit = {token, target == plan_.rank ? token : next_position_[r]++, 0};
      stops_.push_back(target);
    }
    if (target == plan_.rank) {
      at(route_.local_slots, assignment) = slot;
      at(route_.home_slots, assignment) = slot;
      at(route_.home_buffers, assignment) = 1;
      return;
    }
    const auto entry = visit.position * route_.width + visit.num_slots++;
    at(sent_slots_, entry) = slot;
    at(route_.send_entries, assignment) = static_cast<std::int32_t>(entry);
    if (slot >= 0) {
      at(route_.home_slots, assignment) = static_cast<std::int32_t>(next_home_[r]++);
    }
  }

  // The ranks that a token goes to, this one too, in rank order.
  void add_stops(std::int64_t token) {
    std::ranges::sort(stops_);
    std::int64_t sent = token * plan_.top_k;
    std::int64_t partial = token * plan_.top_k;
    for (const auto target : stops_) {
      const auto position =
          static_cast<std::int32_t>(visits_[static_cast<std::size_t>(target)].position);
      at(route_.partial_slots, partial) = position;
      at(route_.partial_buffers, partial++) = target == plan_.rank ? 1 : 0;
      if (target != plan_.rank) at(route_.send_positions, sent++) = position;
    }
  }

  const Plan::Data& plan_;
  PackedRoute& route_;
  std::vector<Visit> visits_;                // [ranks]
  std::vector<std::int64_t> next_position_;  // [ranks]
  std::vector<std::int64_t> next_home_;      // [ranks]
  std::vector<std::int32_t> stops_;
  Tensor sent_slots_;
};

// Which rows leave when every assignment gets its own.
void fill_returns(PackedRoute& route) {
  const auto slots = route.received_slots.span<std::int32_t>();
  std::vector<std::int32_t> returned;
  std::size_t next = 0;
  for (const auto tokens : route.received_tokens) {
    const auto before = returned.size();
    for (const auto end = next + static_cast<std::size_t>(tokens * route.width); next < end;
         ++next) {
      if (slots[next] >= 0) returned.push_back(slots[next]);
    }
    route.returned_rows.push_back(static_cast<std::int64_t>(returned.size() - before));
  }
  route.returned_slots = Tensor::from<std::int32_t>({static_cast<std::int64_t>(returned.size())},
                                                    std::span<const std::int32_t>(returned));
}

}  // namespace

std::int64_t PackedRoute::num_sent() const { return total(sent_tokens); }
std::int64_t PackedRoute::num_received() const { return total(received_tokens); }

PackedRoute make_packed_route(Communicator& comm, const Plan::Data& plan) {
  const auto num_ranks = static_cast<std::size_t>(comm.size());
  const auto self = static_cast<std::size_t>(plan.rank);
  PackedRoute route;
  const bool repeats = plan.options.duplicate_ids == DuplicateIds::allow;
  route.width = repeats
                    ? plan.top_k
                    : std::min<std::int64_t>(plan.top_k, plan.placement->max_experts_per_rank());
  route.sent_tokens.resize(num_ranks);
  route.received_tokens.resize(num_ranks);
  route.home_rows.assign(num_ranks, 0);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    if (r == self) continue;
    route.sent_tokens[r] = plan.distinct_tokens[self * num_ranks + r];
    route.received_tokens[r] = plan.distinct_tokens[r * num_ranks + self];
  }
  const auto slots = plan.slots.span<std::int32_t>();
  const auto targets = plan.target_ranks.span<std::int32_t>();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0 && targets[i] != plan.rank) {
      ++route.home_rows[static_cast<std::size_t>(targets[i])];
    }
  }
  const Tensor sent_slots = RouteBuilder(plan, route).build();
  route.received_slots = Tensor({route.num_received(), route.width}, Dtype::i32);
  comm.all_to_all(sent_slots, route.sent_tokens, route.received_slots, route.received_tokens);
  fill_returns(route);
  return route;
}

}  // namespace switchyard
