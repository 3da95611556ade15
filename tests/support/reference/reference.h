// The slow, obvious reference: the whole job in one process, one loop an idea.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// An index of a standard container.
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One token's pick.
struct Assignment {
  int source = 0;  // the token's rank
  std::int64_t token = 0;
  std::int64_t k = 0;
};

// The plan of all ranks, by placing one assignment after the other.
struct ReferencePlan {
  ReferencePlan(const ExpertPlacement& placement, const std::vector<Tensor>& ids_of_rank,
                std::int64_t alignment);

  std::int64_t top_k = 0;
  std::vector<std::vector<std::int32_t>> row_offsets;        // [rank][local experts + 1]
  std::vector<std::vector<std::int32_t>> group_rows;         // [rank][local experts]
  std::vector<std::vector<std::optional<Assignment>>> rows;  // [rank][slot]; none: a pad
  std::vector<std::vector<std::int32_t>> slots;              // [rank][token · K + k]
  std::vector<std::vector<std::int32_t>> owners;             // likewise
};

// What one rank ends up with, computed from everybody's inputs.

// Tokens to rows: row = [scale ·] token, pads zero.
Tensor reference_scatter(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                         const std::vector<Tensor>* scale);

// Rows to tokens: Σ_k [weight ·] row, in f32 and in k order.
Tensor reference_gather(const ReferencePlan& plan, int rank, const std::vector<Tensor>& rows,
                        const std::vector<Tensor>* weights, Dtype dtype, std::int64_t hidden);

// ⟨token, row⟩ of every assignment, in double.
Tensor reference_dots(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                      const std::vector<Tensor>& rows);

// One number a row to the tokens' ranks, and one an assignment to the rows.
Tensor reference_scatter_scalars(const ReferencePlan& plan, int rank,
                                 const std::vector<Tensor>& scalars);
Tensor reference_gather_scalars(const ReferencePlan& plan, int rank,
                                const std::vector<Tensor>& row_scalars);

}  // namespace switchyard::testing
