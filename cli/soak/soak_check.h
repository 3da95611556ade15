// SPDX-License-Identifier: Apache-2.0
// Checks a step's results against the bits of one rank and against the plain layer.
#pragma once

#include <string>
#include <vector>

#include "soak/soak_model.h"

namespace switchyard::cli {

// These functions throw a std::runtime_error that says which tensor is wrong, and where.

// Compares a rank's results with its part of what one rank alone computed for the whole sequence;
// `first` is the rank's first token.
void require_bits_of_one_rank(const SoakResult& part, const SoakResult& one,
                              const ExpertPlacement& placement, int rank, std::int64_t first);
// Compares the results for the whole sequence, from one rank or from all together, with the plain
// layer.
void require_plain(const SoakCase& c, std::size_t layer, const SoakInput& whole,
                   const SoakResult& result);
// Checks the status of a bounded plan, which covers all ranks, against the routing `ids` [T, K].
void require_status(const SoakResult& result, const SoakLayer& layer, Room room,
                    const ExpertPlacement& placement, const Tensor& ids);

// Collective. Returns the results of all ranks as if from one. Gradients of a tensor that several
// ranks have are summed.
SoakResult assemble(Communicator& comm, const SoakCase& c, std::size_t layer,
                    const ExpertPlacement& placement, const SoakResult& part, std::int64_t first,
                    std::int64_t num_tokens);
// Collective. Checks that the gradients of tensors that every rank has, summed, are near those of
// one rank.
void require_near_sum(Communicator& comm, const SoakResult& part, const SoakResult& one);

}  // namespace switchyard::cli
