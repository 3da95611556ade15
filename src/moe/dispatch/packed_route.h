// How the packed mover takes a plan's assignments over all_to_all.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// S tokens are sent to other ranks, counting a token once for each rank that it goes to; N are
// received; each has up to W = `width` slots at its owner. Assignments to this rank itself do not
// travel, nor do those that found no room.
struct PackedRoute {
  std::int64_t width = 0;
  std::vector<std::int64_t> sent_tokens;      // [ranks], Σ = S
  std::vector<std::int64_t> received_tokens;  // [ranks], Σ = N
  Tensor send_positions;                      // [T, ≤ K] i32: where a token goes among the S
  Tensor
      send_entries;  // [T, K] i32: where an assignment goes in a table [S, W]; −1: stays, or none
  Tensor received_slots;  // [N, W] i32: the slots here of the received tokens
  Tensor local_slots;     // [T, K] i32: the slots here of own tokens

  // The way back, one row an assignment: M leave here, M' come home.
  std::vector<std::int64_t> returned_rows;  // [ranks], Σ = M
  std::vector<std::int64_t> home_rows;      // [ranks], Σ = M'
  Tensor returned_slots;                    // [M] i32: which rows leave, by rank, token and k
  Tensor home_slots;                        // [T, K] i32: among the M', or a slot here
  Tensor home_buffers;                      // [T, K] i32: 0 = came home, 1 = was here

  // The way back, one row a token and rank: entries in rank order, so that sums are too.
  Tensor partial_slots;    // [T, ≤ K] i32: among the S that come back, or the token's own number
  Tensor partial_buffers;  // [T, ≤ K] i32: 0 = came back, 1 = made here

  std::int64_t num_sent() const;
  std::int64_t num_received() const;
  std::int64_t num_home() const;  // M'
  std::int64_t bytes() const;     // of all tables
};

// Collective: tells every owner the slots of what it will receive.
PackedRoute make_packed_route(Communicator& comm, const PlanData& plan);

}  // namespace switchyard
