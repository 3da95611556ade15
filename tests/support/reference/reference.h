// SPDX-License-Identifier: Apache-2.0
// A slow, obvious reference: the whole job in one process, one loop per idea.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// Converts an index for a standard container.
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One token's pick.
struct Assignment {
  int source = 0;  // rank of the token
  std::int64_t token = 0;
  std::int64_t k = 0;
};

// The plan of all ranks, made by placing one assignment after another.
struct ReferencePlan {
  ReferencePlan(const ExpertPlacement& placement, const std::vector<Tensor>& ids_of_rank,
                std::int64_t alignment);

  std::int64_t top_k = 0;
  std::vector<std::vector<std::int32_t>> row_offsets;        // [rank][local experts + 1]
  std::vector<std::vector<std::int32_t>> group_rows;         // [rank][local experts]
  std::vector<std::vector<std::optional<Assignment>>> rows;  // [rank][slot]; nullopt: padding
  std::vector<std::vector<std::int32_t>> slots;              // [rank][token · K + k]
  std::vector<std::vector<std::int32_t>> owners;             // [rank][token · K + k]
};

// The functions below return what one rank ends up with, computed from the inputs of all ranks.
// Tokens to rows: row = [scale ·] token, padding is zero.

// Tokens to rows: row = [scale ·] token, pads zero.
Tensor reference_scatter(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                         const std::vector<Tensor>* scale);

// Rows to tokens: Σ_k [weight ·] row, in f32 and in k order.
Tensor reference_gather(const ReferencePlan& plan, int rank, const std::vector<Tensor>& rows,
                        const std::vector<Tensor>* weights, Dtype dtype, std::int64_t hidden);

// Returns ⟨token, row⟩ for every assignment, computed in double.
Tensor reference_dots(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                      const std::vector<Tensor>& rows);

// Moves one number per assignment to the rows, and one per row back to the tokens.
Tensor reference_scatter_scalars(const ReferencePlan& plan, int rank,
                                 const std::vector<Tensor>& scalars);
Tensor reference_gather_scalars(const ReferencePlan& plan, int rank,
                                const std::vector<Tensor>& row_scalars);

}  // namespace switchyard::testing
