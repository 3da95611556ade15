// SPDX-License-Identifier: Apache-2.0
// Random plans against a plain layout: tokens, picks, experts, placements, alignments, capacities,
// and ids that are no pick, repeated or no expert's. SWITCHYARD_PLANS=1000000 makes so many.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "support/device/plain_layout.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"

namespace switchyard::plan_fuzz_test {
namespace {

using testing::index;
using testing::Ints;
using testing::Laid;
using testing::LayoutInput;
using testing::Random;
using testing::RankCase;

#ifdef SWITCHYARD_SANITIZED
constexpr std::int64_t kPlans = 1000;
#else
constexpr std::int64_t kPlans = 10000;
#endif
constexpr int kPlansOfPlanner = 16;

std::int64_t num_plans(int num_ranks) {
  const char* const chosen = std::getenv("SWITCHYARD_PLANS");
  const std::int64_t all = chosen != nullptr ? std::atoll(chosen) : kPlans;
  // Ranks take turns on the cores, so that plans of many are slow.
  static const std::map<int, std::int64_t> percent{{1, 30}, {2, 30}, {3, 15},
                                                   {4, 15}, {7, 5},  {8, 5}};
  return all * percent.at(num_ranks) / 100;
}

// Options of a planner, the same on every rank.
struct Layer {
  Layer(Random& random, int num_ranks)
      : num_experts(static_cast<int>(1 + random.below(12))),
        top_k(1 + random.below(6)),
        placement(draw_placement(random, num_ranks)),
        uses_peers(num_ranks > 1 && random.below(6) == 0) {
    options.hidden = 4;
    options.alignment = std::array{1, 1, 2, 3, 8, 128}.at(index(random.below(6)));
    options.duplicate_ids = random.below(3) == 0 ? DuplicateIds::allow : DuplicateIds::reject;
    options.sentinel_ids = random.below(4) == 0 ? SentinelIds::allow : SentinelIds::reject;
    const auto capacity = options.alignment * random.below(1 + 40 / options.alignment);
    const auto tokens = random.below(3) == 0 ? 1 + random.below(12) : 0;
    const auto kind = random.below(4);
    if (kind == 2) options.sizing = Sizing::bounded(capacity, Overflow::fail, tokens);
    if (kind == 3) options.sizing = Sizing::bounded(capacity, Overflow::drop, tokens);
  }

  ExpertPlacement draw_placement(Random& random, int num_ranks) const {
    if (random.below(2) == 0) return ExpertPlacement::contiguous(num_experts, num_ranks);
    std::vector<std::int32_t> owners;
    for (int e = 0; e < num_experts; ++e) {
      owners.push_back(static_cast<std::int32_t>(random.below(num_ranks)));
    }
    return ExpertPlacement::from_owners(std::move(owners), num_ranks);
  }
  // Whether a token crosses to a rank once, so that its capacity for tokens counts.
  bool crosses_once() const {
    return uses_peers &&
           !(options.sizing.is_bounded() && options.sizing.overflow() == Overflow::drop);
  }

  int num_experts;
  std::int64_t top_k;
  ExpertPlacement placement;
  bool uses_peers;
  PlanOptions options;
};

// The ids of every rank [T, K]: most are experts, one of some kind is not.
std::vector<Tensor> draw_ids(Random& random, const Layer& layer, int num_ranks) {
  const bool has_bad = random.below(4) == 0;
  const double skew = static_cast<double>(random.below(3)) / 2.0;
  std::vector<Tensor> ids;
  for (int r = 0; r < num_ranks; ++r) {
    const auto num_tokens = random.below(4) == 0 ? 0 : random.below(10);
    ids.push_back(random.expert_ids(
        {num_tokens, layer.top_k, layer.num_experts, skew, random.below(2) == 0 ? 0.0 : 0.3}));
    const auto values = ids.back().span<std::int32_t>();
    if (!has_bad || values.empty() || random.below(2) == 0) continue;
    const auto at = index(random.below(std::ssize(values)));
    const auto first = at / index(layer.top_k) * index(layer.top_k);
    const std::array bad{layer.num_experts, layer.num_experts + 1,          -2, INT32_MIN,
                         INT32_MAX,         static_cast<int>(values[first])};
    values[at] = bad.at(index(random.below(std::ssize(bad))));
  }
  return ids;
}

// The plan of everybody's ids, made one id after the other.
struct Expected {
  Expected(const Layer& layer, std::vector<Tensor>& ids, int rank) {
    const int num_ranks = layer.placement.num_ranks();
    const auto by_expert = layer.placement.owners();
    in = {.counts = Ints(index(num_ranks * layer.num_experts)),
          .owners = Ints(by_expert.begin(), by_expert.end()),
          .num_ranks = num_ranks,
          .rank = rank,
          .alignment = layer.options.alignment,
          .sizing = layer.options.sizing};
    distinct_tokens.resize(index(num_ranks * num_ranks));
    for (int r = 0; r < num_ranks; ++r) count(layer, ids[index(r)], r);
    if (layer.crosses_once()) {
      in.distinct_tokens = distinct_tokens;
    } else if (in.sizing.is_bounded()) {
      in.sizing = Sizing::bounded(in.sizing.capacity(), in.sizing.overflow());
    }
    laid = testing::lay_out_plainly(in);
    place(layer, ids[index(rank)]);
  }

  // Refused ids become −1.
  void count(const Layer& layer, Tensor& ids, int rank) {
    for (std::int64_t t = 0; t < ids.rows(); ++t) {
      std::set<std::int32_t> picked;
      std::set<int> ranks;
      for (std::int64_t k = 0; k < layer.top_k; ++k) {
        auto& id = ids.span<std::int32_t>()[index(t * layer.top_k + k)];
        const bool is_sentinel =
            id >= layer.num_experts && layer.options.sentinel_ids == SentinelIds::allow;
        const bool is_expert = 0 <= id && id < layer.num_experts;
        const bool repeats =
            is_expert && picked.contains(id) && layer.options.duplicate_ids == DuplicateIds::reject;
        if (id != -1 && !is_sentinel && (!is_expert || repeats) && error.empty()) {
          error = "rank " + std::to_string(rank) + ": expert_ids[" + std::to_string(t) + "," +
                  std::to_string(k) + "] is " + std::to_string(id) +
                  (repeats ? ", which the token has picked already"
                           : ", which is neither -1 nor an expert of " +
                                 std::to_string(layer.num_experts));
        }
        if (!is_expert || repeats) {
          id = -1;
          continue;
        }
        picked.insert(id);
        ranks.insert(layer.placement.owner(id));
        ++in.counts[index(rank * layer.num_experts + id)];
      }
      for (const int owner : ranks) ++distinct_tokens[index(rank * in.num_ranks + owner)];
    }
  }

  void place(const Layer& layer, const Tensor& ids) {
    std::vector<std::int64_t> next(index(layer.num_experts));
    for (int e = 0; e < layer.num_experts; ++e) {
      for (int r = 0; r < in.rank; ++r) next[index(e)] += in.count(r, e);
    }
    for (const auto id : ids.span<std::int32_t>()) {
      owners.push_back(id < 0 ? -1 : layer.placement.owner(id));
      const auto position = id < 0 ? 0 : next[index(id)]++;
      const bool has_room = id >= 0 && position < laid.kept_rows[index(id)];
      slots.push_back(
          has_room ? static_cast<std::int32_t>(laid.expert_offsets[index(id)] + position) : -1);
    }
  }

  std::int64_t word(std::int64_t at) const { return laid.layout[index(at)]; }

  LayoutInput in;
  Ints distinct_tokens;  // [ranks, ranks]
  std::string error;     // of the first bad id; empty: none
  Laid laid;
  Ints slots, owners;
};

Ints ints_of(const ConstTensorView& view) {
  const auto span = view.span<std::int32_t>();
  return {span.begin(), span.end()};
}

// Names what differs; empty if nothing does.
std::string difference(const Plan& plan, const Layer& layer, const Expected& expected) {
  const int num_ranks = layer.placement.num_ranks();
  if (ints_of(plan.row_offsets()) != expected.laid.row_offsets) return "row_offsets";
  if (ints_of(plan.group_rows()) != expected.laid.group_rows) return "group_rows";
  if (ints_of(plan.slots()) != expected.slots) return "slots";
  if (ints_of(plan.target_ranks()) != expected.owners) return "target_ranks";
  if (ints_of(plan.source_offsets()) != expected.laid.source_offsets) return "source_offsets";
  if (plan.num_rows() != expected.laid.row_offsets.back()) return "num_rows";
  const PlanStatus status = plan.status();
  const bool is_bounded = layer.options.sizing.is_bounded();
  if (status.bad_ids != !expected.error.empty()) return "bad_ids";
  if (status.bad_ids_message != expected.error) return "bad_ids_message";
  if (status.overflow != (expected.word(kOverflowWord) != 0)) return "overflow";
  for (int r = 0; r < num_ranks; ++r) {
    if (status.needed_rows.at(index(r)) != expected.word(needed_rows_word(num_ranks, r))) {
      return "needed_rows";
    }
    if (is_bounded && status.dropped.at(index(r)) != expected.word(dropped_word(num_ranks, r))) {
      return "dropped";
    }
    for (int e = 0; e < layer.num_experts; ++e) {
      if (plan.counts(r)[index(e)] != expected.in.count(r, e)) return "counts";
    }
    for (int to = 0; to < num_ranks; ++to) {
      if (plan.distinct_tokens(r, to) != expected.distinct_tokens[index(r * num_ranks + to)]) {
        return "distinct_tokens";
      }
    }
  }
  return {};
}

// Plans with a Planner, or in peer memory with a Dispatcher.
class Maker {
 public:
  Maker(Communicator& comm, const Layer& layer) {
    if (!layer.uses_peers) {
      planner_.emplace(comm, layer.placement, layer.options);
      return;
    }
    dispatcher_.emplace(comm, layer.placement,
                        DispatcherOptions{.plan = layer.options, .mover = MoverKind::peer});
  }
  Plan plan(const ConstTensorView& ids) {
    return planner_ ? planner_->plan(ids) : dispatcher_->plan(ids);
  }

 private:
  std::optional<Planner> planner_;
  std::optional<Dispatcher> dispatcher_;
};

std::string what_is_wrong(Maker& maker, const Layer& layer, const Tensor& ids,
                          const Expected& expected) {
  const bool throws = !expected.error.empty() && !layer.options.sizing.is_bounded();
  try {
    const Plan plan = maker.plan(ids);
    return throws ? "there is no error, but must be: " + expected.error
                  : difference(plan, layer, expected);
  } catch (const InvalidArgument& error) {
    return throws && error.what() == expected.error ? "" : error.what();
  }
}

class PlanFuzz : public ::testing::TestWithParam<RankCase> {};

TEST_P(PlanFuzz, EqualsThePlainLayout) {
  testing::on_ranks(GetParam(), [](Communicator& comm) {
    // Keeps the memory that ranks share for all plans.
    std::optional<Dispatcher> keeper;
    if (comm.size() > 1) {
      keeper.emplace(comm, ExpertPlacement::contiguous(1, comm.size()),
                     DispatcherOptions{.plan = {.hidden = 1}, .mover = MoverKind::peer});
    }
    bool is_wrong = false;
    const std::int64_t count = num_plans(comm.size());
    for (std::int64_t done = 0; done < count; done += kPlansOfPlanner) {
      Random random(static_cast<std::uint64_t>(done + 1));
      const Layer layer(random, comm.size());
      Maker maker(comm, layer);
      for (int i = 0; i < kPlansOfPlanner; ++i) {
        auto ids = draw_ids(random, layer, comm.size());
        const Tensor mine = ids[index(comm.rank())].clone();
        const Expected expected(layer, ids, comm.rank());
        const auto wrong = what_is_wrong(maker, layer, mine, expected);
        // The others wait for this rank's next plans, so it goes on.
        if (!wrong.empty() && !is_wrong) {
          ADD_FAILURE() << "rank " << comm.rank() << ", plan " << i << " of seed " << done + 1
                        << ": " << wrong;
        }
        is_wrong = is_wrong || !wrong.empty();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, PlanFuzz, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::plan_fuzz_test
