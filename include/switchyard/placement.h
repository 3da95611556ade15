// SPDX-License-Identifier: Apache-2.0
// The assignment of experts to ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

// Maps every expert to the one rank that owns it; a rank may own none. A rank holds its experts in
// ascending order of id, which is also the order of their groups in its rows. Numbers that are out
// of range throw InvalidArgument.
class SWITCHYARD_API ExpertPlacement {
 public:
  // Places consecutive experts on consecutive ranks. The first num_experts mod num_ranks ranks own
  // one expert more than the others.
  static ExpertPlacement contiguous(int num_experts, int num_ranks);
  // Places expert e on rank owners[e].
  static ExpertPlacement from_owners(std::vector<std::int32_t> owners, int num_ranks);
  // Places the experts listed in experts_of_rank[r] on rank r. Every expert must be listed exactly
  // once.
  static ExpertPlacement from_lists(int num_experts,
                                    const std::vector<std::vector<int>>& experts_of_rank);

  int num_experts() const { return static_cast<int>(owners_.size()); }
  int num_ranks() const { return static_cast<int>(experts_.size()); }
  // The rank that owns the expert. Throws InvalidArgument if there is no such expert.
  int owner(int expert) const {
    if (expert < 0 || expert >= num_experts()) [[unlikely]] {
      refuse_expert(expert);
    }
    return owners_[static_cast<std::size_t>(expert)];
  }
  std::span<const std::int32_t> owners() const { return owners_; }
  // The experts of a rank, in ascending order.
  std::span<const std::int32_t> experts_of(int rank) const {
    if (rank < 0 || rank >= num_ranks()) [[unlikely]] {
      refuse_rank(rank);
    }
    return experts_[static_cast<std::size_t>(rank)];
  }
  // The largest number of experts that any rank owns.
  int max_experts_per_rank() const;

  friend bool operator==(const ExpertPlacement&, const ExpertPlacement&) = default;

 private:
  [[noreturn]] void refuse_expert(int expert) const;
  [[noreturn]] void refuse_rank(int rank) const;

  std::vector<std::int32_t> owners_;                // [num_experts]
  std::vector<std::vector<std::int32_t>> experts_;  // [num_ranks][…]
};

}  // namespace switchyard
