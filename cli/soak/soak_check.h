// Whether a step's results are right: by the bits of one rank, and by the plain layer.
#pragma once

#include <string>
#include <vector>

#include "soak/soak_model.h"

namespace switchyard::cli {

// Throw a std::runtime_error that says which tensor is wrong, and where.

// A rank's part of what one rank alone made of the whole sequence; `first` is its first token.
void require_bits_of_one_rank(const SoakResult& part, const SoakResult& one,
                              const ExpertPlacement& placement, int rank, std::int64_t first);
// The results of the whole sequence, by one rank or by all together.
void require_plain(const SoakCase& c, std::size_t layer, const SoakInput& whole,
                   const SoakResult& result);
// The status of a bounded plan, which knows the routing of all ranks: `ids` [T, K] as routed.
void require_status(const SoakResult& result, const SoakLayer& layer, Room room,
                    const ExpertPlacement& placement, const Tensor& ids);

// Collective: the results of all ranks as those of one; gradients are summed where ranks have some
// of the same tensor.
SoakResult assemble(Communicator& comm, const SoakCase& c, std::size_t layer,
                    const ExpertPlacement& placement, const SoakResult& part, std::int64_t first,
                    std::int64_t num_tokens);
// Collective: the gradients of what every rank has, summed, are near those of one rank.
void require_near_sum(Communicator& comm, const SoakResult& part, const SoakResult& one);

}  // namespace switchyard::cli
