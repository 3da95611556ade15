// SPDX-License-Identifier: Apache-2.0
// Random cases. Each is a pure function of a seed, a number and the limits, so that it can be rerun
// alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/random.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// Draws random numbers one after another.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}

  std::uint64_t bits() { return train::random_bits(seed_, index_++); }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound));
  }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + below(most - least + 1);
  }
  bool one_in(std::int64_t count) { return below(count) == 0; }
  float signed_unit() { return static_cast<float>(bits() >> 40) / 8388608.0F - 1.0F; }
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }

 private:
  std::uint64_t seed_;
  std::uint64_t index_ = 0;
};

// Where a layer's picks come from.
enum class PickSource { router, given_ids, given_weights };

// How much room there is for rows, and what happens to those that do not fit.
enum class Room { exact, plenty, replay, refuse, drop };

struct SoakLayer {
  MoeLayerOptions options;  // with exact sizing; SoakCase::room decides the sizing
  Biases biases = Biases::none;
  PickSource source = PickSource::router;
  double skew = 0.0;       // skew of given ids: 0 is uniform, with 1 most go to few experts
  bool drops_ids = false;  // some given ids are −1
  bool has_padding = false;
  RouterLosses d_losses = {};
  std::int64_t capacity = 0;         // rows per rank, unless the room is exact
  std::vector<std::int64_t> owners;  // owner of each expert, modulo the ranks; empty: contiguous

  // True if the results must have the same bits as on one rank.
  bool has_bits_of_one_rank(Room room) const;
  ExpertPlacement placement(int num_ranks) const;
};

enum class KillKind { throws, silent };

struct SoakKill {
  int rank = 0;
  std::int64_t collective = 1;  // the collective that the rank does not enter, counted from 1
  KillKind kind = KillKind::throws;
};

struct SoakCase {
  std::uint64_t seed = 0;
  std::int64_t number = 0;
  int num_ranks = 1;
  int num_groups = 1;  // rank r belongs to group r % num_groups; each group has its own experts
  int threads = 1;     // per rank, on CPUs
  Room room = Room::exact;
  std::vector<SoakLayer> layers = {};
  std::vector<std::vector<std::int64_t>> tokens = {};  // [step][rank]
  std::optional<SoakKill> kill = {};
  int bad_step = -1;  // before this step, one rank gives an id that no expert has; −1: never

  int num_steps() const { return static_cast<int>(tokens.size()); }
  // Returns the token counts of the group's ranks, in rank order.
  std::vector<std::int64_t> tokens_of_group(int step, int group) const;
  // Returns a seed for this part of the case.
  std::uint64_t seed_for(std::string_view what, int step = 0, std::size_t layer = 0,
                         int group = 0) const;
  std::string words() const;
};

// The ranks and movers that cases may have.
struct CaseLimits {
  int ranks = 0;  // 0: any number from 1 to 8
  bool is_gpu = false;
  bool maps_memory = true;  // true if ranks may use the direct mover
};
SoakCase draw_case(std::uint64_t seed, std::int64_t number, const CaseLimits& limits);

}  // namespace switchyard::cli
