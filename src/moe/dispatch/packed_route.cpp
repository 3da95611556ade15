// SPDX-License-Identifier: Apache-2.0
// Builds routes with two passes over the assignments and one exchange of slots. Assignments that
// found no room at their owner do not travel.
#include "moe/dispatch/packed_route.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "comm/failure_listener.h"
#include "core/require.h"
#include "moe/plan/plan_data.h"

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

// A token's visit to one rank: its position among the sent tokens, and its slots there so far.
struct Visit {
  std::int64_t token = -1;
  std::int64_t position = 0;
  std::int64_t num_slots = 0;
};

// Fills the tables of a route token by token.
class RouteBuilder {
 public:
  RouteBuilder(const PlanData& plan, PackedRoute& route)
      : plan_(plan),
        width_(route.width),
        targets_(plan.target_ranks.span<std::int32_t>()),
        slots_(plan.slots.span<std::int32_t>()),
        visits_(route.sent_tokens.size()),
        next_position_(exclusive_sums(route.sent_tokens)),
        next_home_(exclusive_sums(route.home_rows)),
        send_positions_(make_table(route.send_positions)),
        send_entries_(make_table(route.send_entries)),
        local_slots_(make_table(route.local_slots)),
        home_slots_(make_table(route.home_slots)),
        home_buffers_(make_table(route.home_buffers)),
        partial_slots_(make_table(route.partial_slots)),
        partial_buffers_(make_table(route.partial_buffers)) {}

  // Fills the route's tables, and `sent_slots` [S, W], which goes to the owners.
  void build(Indices sent_slots) {
    for (std::int64_t t = 0; t < plan_.num_tokens; ++t) {
      stops_.clear();
      const std::int64_t first = t * plan_.top_k;
      for (std::int64_t i = first; i < first + plan_.top_k; ++i) {
        add_assignment(t, static_cast<std::size_t>(i), sent_slots);
      }
      add_stops(static_cast<std::size_t>(first));
    }
  }

 private:
  Indices make_table(Tensor& tensor) const {
    tensor = no_indices(plan_.num_tokens, plan_.top_k);
    return tensor.span<std::int32_t>();
  }

  void add_assignment(std::int64_t token, std::size_t assignment, Indices sent_slots) {
    const std::int32_t target = targets_[assignment];
    const std::int32_t slot = slots_[assignment];
    if (slot < 0) return;
    const auto r = static_cast<std::size_t>(target);
    const bool stays = target == plan_.rank;
    Visit& visit = visits_[r];
    if (visit.token != token) {
      visit = {token, stays ? token : next_position_[r]++, 0};
      stops_.push_back(target);
    }
    home_buffers_[assignment] = stays ? 1 : 0;
    if (stays) {
      local_slots_[assignment] = slot;
      home_slots_[assignment] = slot;
      return;
    }
    const auto entry = visit.position * width_ + visit.num_slots++;
    sent_slots[static_cast<std::size_t>(entry)] = slot;
    send_entries_[assignment] = static_cast<std::int32_t>(entry);
    home_slots_[assignment] = static_cast<std::int32_t>(next_home_[r]++);
  }

  // Records the ranks that a token goes to, including this one, in rank order.
  void add_stops(std::size_t first_assignment) {
    std::ranges::sort(stops_);
    std::size_t sent = first_assignment;
    std::size_t partial = first_assignment;
    for (const auto target : stops_) {
      const auto position =
          static_cast<std::int32_t>(visits_[static_cast<std::size_t>(target)].position);
      partial_slots_[partial] = position;
      partial_buffers_[partial++] = target == plan_.rank ? 1 : 0;
      if (target != plan_.rank) send_positions_[sent++] = position;
    }
  }

  const PlanData& plan_;
  std::int64_t width_;
  std::span<const std::int32_t> targets_, slots_;
  std::vector<Visit> visits_;                // [ranks]
  std::vector<std::int64_t> next_position_;  // [ranks]
  std::vector<std::int64_t> next_home_;      // [ranks]
  std::vector<std::int32_t> stops_;
  Indices send_positions_, send_entries_, local_slots_, home_slots_, home_buffers_, partial_slots_,
      partial_buffers_;
};

// Checks that 32 bits can index the tables of sent tokens and their slots. Every rank checks all
// ranks, so that all of them throw.
void require_indexable(const PlanData& plan, std::int64_t width) {
  const auto num_ranks = static_cast<std::size_t>(plan.placement->num_ranks());
  for (std::size_t source = 0; source < num_ranks; ++source) {
    std::int64_t sent = 0;
    for (std::size_t target = 0; target < num_ranks; ++target) {
      sent += plan.known.distinct_tokens[source * num_ranks + target];
    }
    require(sent * width <= std::numeric_limits<std::int32_t>::max(),
            "rank {} sends {} tokens with up to {} slots each, more than 2^31 in one plan; split "
            "its tokens",
            source, sent, width);
  }
}

// Counts the tokens that have a slot at each other rank, and their slots there.
void count_sent(const PlanData& plan, PackedRoute& route) {
  const auto slots = plan.slots.span<std::int32_t>();
  const auto targets = plan.target_ranks.span<std::int32_t>();
  std::vector<std::int64_t> last_token(route.sent_tokens.size(), -1);
  std::size_t assignment = 0;
  for (std::int64_t t = 0; t < plan.num_tokens; ++t) {
    for (std::int64_t k = 0; k < plan.top_k; ++k, ++assignment) {
      if (slots[assignment] < 0 || targets[assignment] == plan.rank) continue;
      const auto r = static_cast<std::size_t>(targets[assignment]);
      ++route.home_rows[r];
      if (last_token[r] == t) continue;
      last_token[r] = t;
      ++route.sent_tokens[r];
    }
  }
}

// Returns the number of tokens received from each rank. Collective if the plan overflows: its
// records count tokens before some of them find no room.
std::vector<std::int64_t> count_received(Communicator& comm, const PlanData& plan,
                                         const std::vector<std::int64_t>& sent_tokens) {
  const auto num_ranks = sent_tokens.size();
  const auto self = static_cast<std::size_t>(plan.rank);
  std::vector<std::int64_t> received(num_ranks);
  if (plan.known.status.overflow) {
    const auto size = static_cast<std::int64_t>(num_ranks);
    const std::vector<std::int64_t> one_each(num_ranks, 1);
    comm.all_to_all(ConstTensorView(sent_tokens.data(), {size}), one_each,
                    TensorView(received.data(), {size}), one_each);
    return received;
  }
  for (std::size_t r = 0; r < num_ranks; ++r) {
    if (r != self) received[r] = plan.known.distinct_tokens[r * num_ranks + self];
  }
  return received;
}

// Lists the rows that leave if one row is returned per assignment. A corrupted slot would send a
// row to the wrong place, so every slot must be in range and taken only once.
void fill_returns(Communicator& comm, std::int64_t num_rows, PackedRoute& route) {
  const auto slots = route.received_slots.span<std::int32_t>();
  std::vector<bool> is_taken(static_cast<std::size_t>(num_rows));
  std::vector<std::int32_t> returned;
  std::size_t next = 0;
  for (int source = 0; source < comm.size(); ++source) {
    const auto tokens = route.received_tokens[static_cast<std::size_t>(source)];
    const auto before = returned.size();
    for (const auto end = next + static_cast<std::size_t>(tokens * route.width); next < end;
         ++next) {
      const auto slot = slots[next];
      if (slot == -1) continue;
      if (slot < 0 || slot >= num_rows || is_taken[static_cast<std::size_t>(slot)]) {
        FailureListeners::fail(
            comm,
            fmt::format("dispatch: rank {} sends a token to slot {} of rank {}, but that slot is "
                        "not one of the {} rows there or is already taken",
                        source, slot, comm.rank(), num_rows),
            {source});
      }
      is_taken[static_cast<std::size_t>(slot)] = true;
      returned.push_back(slot);
    }
    route.returned_rows.push_back(static_cast<std::int64_t>(returned.size() - before));
  }
  route.returned_slots = Tensor::from<std::int32_t>({static_cast<std::int64_t>(returned.size())},
                                                    std::span<const std::int32_t>(returned));
}

}  // namespace

std::int64_t PackedRoute::num_sent() const { return total(sent_tokens); }
std::int64_t PackedRoute::num_received() const { return total(received_tokens); }
std::int64_t PackedRoute::num_home() const { return total(home_rows); }
std::int64_t PackedRoute::bytes() const {
  std::int64_t bytes = 0;
  for (const Tensor* table :
       {&send_positions, &send_entries, &received_slots, &local_slots, &returned_slots, &home_slots,
        &home_buffers, &partial_slots, &partial_buffers}) {
    bytes += table->bytes();
  }
  return bytes;
}

PackedRoute make_packed_route(Communicator& comm, const PlanData& plan) {
  const auto num_ranks = static_cast<std::size_t>(comm.size());
  PackedRoute route;
  const bool repeats = plan.options.duplicate_ids == DuplicateIds::allow;
  route.width = repeats
                    ? plan.top_k
                    : std::min<std::int64_t>(plan.top_k, plan.placement->max_experts_per_rank());
  require_indexable(plan, route.width);
  route.sent_tokens.assign(num_ranks, 0);
  route.home_rows.assign(num_ranks, 0);
  count_sent(plan, route);
  route.received_tokens = count_received(comm, plan, route.sent_tokens);
  Tensor sent_slots = no_indices(route.num_sent(), route.width);
  RouteBuilder(plan, route).build(sent_slots.span<std::int32_t>());
  route.received_slots = Tensor({route.num_received(), route.width}, Dtype::i32);
  comm.all_to_all(sent_slots, route.sent_tokens, route.received_slots, route.received_tokens);
  fill_returns(comm, plan.known.num_rows, route);
  return route;
}

}  // namespace switchyard
