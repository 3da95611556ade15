// SPDX-License-Identifier: Apache-2.0
// The tables by which the packed mover sends assignments over all_to_all.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// This rank sends S tokens to other ranks, counting a token once per destination, and receives N.
// Each of them has up to W = `width` slots at its destination. Assignments to this rank itself and
// assignments that found no room do not travel.
struct PackedRoute {
  std::int64_t width = 0;
  std::vector<std::int64_t> sent_tokens;      // [ranks], Σ = S
  std::vector<std::int64_t> received_tokens;  // [ranks], Σ = N
  Tensor send_positions;  // [T, K] i32: the places of a token among the S, then −1
  Tensor send_entries;    // [T, K] i32: index in a table [S, W]; −1 if not sent
  Tensor received_slots;  // [N, W] i32: slots of the received tokens on this rank
  Tensor local_slots;     // [T, K] i32: slots of own tokens on this rank

  // The way back with one row per assignment: M rows leave this rank, M' come home.
  std::vector<std::int64_t> returned_rows;  // [ranks], Σ = M
  std::vector<std::int64_t> home_rows;      // [ranks], Σ = M'
  Tensor returned_slots;  // [M] i32: slots of the rows that leave, by rank, token, k
  Tensor home_slots;      // [T, K] i32: index among the M', or a slot on this rank
  Tensor home_buffers;    // [T, K] i32: 0 = among the M', 1 = on this rank

  // The way back with one row per token and rank. Entries are in rank order, and so are the sums.
  Tensor partial_slots;    // [T, K] i32: index among the S that come back, or the own token
  Tensor partial_buffers;  // [T, K] i32: 0 = comes back, 1 = summed on this rank

  std::int64_t num_sent() const;
  std::int64_t num_received() const;
  std::int64_t num_home() const;  // M'
  std::int64_t bytes() const;     // total size of the tables
};

// Collective. Builds the route of a plan and tells every owner the slots of the tokens that it will
// receive.
PackedRoute make_packed_route(Communicator& comm, const PlanData& plan);

}  // namespace switchyard
