// Which rank owns which expert.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

// Every expert has exactly one owner; a rank may own none. A rank holds its experts in ascending
// order of id: that order is the order of their groups in the rank's rows.
class SWITCHYARD_API ExpertPlacement {
 public:
  // Consecutive experts on consecutive ranks; the first num_experts mod num_ranks ranks own one
  // more than the others.
  static ExpertPlacement contiguous(int num_experts, int num_ranks);
  // owners[e] is the rank of expert e.
  static ExpertPlacement from_owners(std::vector<std::int32_t> owners, int num_ranks);
  // experts_of_rank[r] lists the experts of rank r; every one of num_experts is listed once.
  static ExpertPlacement from_lists(int num_experts,
                                    const std::vector<std::vector<int>>& experts_of_rank);

  int num_experts() const { return static_cast<int>(owners_.size()); }
  int num_ranks() const { return static_cast<int>(experts_.size()); }
  int owner(int expert) const {
    if (expert < 0 || expert >= num_experts()) [[unlikely]] {
      refuse_expert(expert);
    }
    return owners_[static_cast<std::size_t>(expert)];
  }
  std::span<const std::int32_t> owners() const { return owners_; }
  // Ascending.
  std::span<const std::int32_t> experts_of(int rank) const {
    if (rank < 0 || rank >= num_ranks()) [[unlikely]] {
      refuse_rank(rank);
    }
    return experts_[static_cast<std::size_t>(rank)];
  }
  // The most experts that any rank owns.
  int max_experts_per_rank() const;

  friend bool operator==(const ExpertPlacement&, const ExpertPlacement&) = default;

 private:
  [[noreturn]] void refuse_expert(int expert) const;
  [[noreturn]] void refuse_rank(int rank) const;

  std::vector<std::int32_t> owners_;                // [num_experts]
  std::vector<std::vector<std::int32_t>> experts_;  // [num_ranks][…]
};

}  // namespace switchyard
