// Random cases: each is a pure function of a seed and a number, so that it can be run again alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/random.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// One random number after the other.
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

// How much room there is for rows, and what becomes of those that find none.
enum class Room { exact, plenty, replay, refuse, drop };

struct SoakLayer {
  MoeLayerOptions options;  // with exact sizing; the room of the case comes on top
  Biases biases = Biases::none;
  PickSource source = PickSource::router;
  double skew = 0.0;       // of given ids: 0 even, 1 most go to few experts
  bool drops_ids = false;  // some given ids are −1
  bool has_padding = false;
  RouterLosses d_losses = {};
  std::int64_t capacity = 0;         // rows of a rank, unless the room is exact
  std::vector<std::int64_t> owners;  // of experts, modulo the ranks; none: contiguous

  // Whether the bits are promised to be those of one rank.
  bool has_bits_of_one_rank(Room room) const;
  ExpertPlacement placement(int num_ranks) const;
};

enum class KillKind { throws, silent };

struct SoakKill {
  int rank = 0;
  std::int64_t collective = 1;  // that the rank does not come to, counted from 1
  KillKind kind = KillKind::throws;
};

struct SoakCase {
  std::uint64_t seed = 0;
  std::int64_t number = 0;
  int num_ranks = 1;
  int num_groups = 1;  // rank r belongs to group r modulo this, and each has its own experts
  int threads = 1;     // of a rank, on CPUs
  Room room = Room::exact;
  std::vector<SoakLayer> layers = {};
  std::vector<std::vector<std::int64_t>> tokens = {};  // [step][rank]
  std::optional<SoakKill> kill = {};
  int bad_step = -1;  // before which one rank brings an id of no expert

  int num_steps() const { return static_cast<int>(tokens.size()); }
  // Tokens of the group's ranks, in rank order.
  std::vector<std::int64_t> tokens_of_group(int step, int group) const;
  // A seed for this part of the case.
  std::uint64_t seed_for(std::string_view what, int step = 0, std::size_t layer = 0,
                         int group = 0) const;
  std::string words() const;
};

// The ranks and movers that cases may have.
struct CaseLimits {
  int ranks = 0;  // 0: any of 1 to 8
  bool is_gpu = false;
  bool maps_memory = true;  // whether ranks may use the direct mover
};
SoakCase draw_case(std::uint64_t seed, std::int64_t number, const CaseLimits& limits);

}  // namespace switchyard::cli
