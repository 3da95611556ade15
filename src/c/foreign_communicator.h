// SPDX-License-Identifier: Apache-2.0
// A communicator whose bytes are moved by the program's own functions.
#pragma once

#include <chrono>
#include <memory>

#include "switchyard/c/parallel.h"
#include "switchyard/communicator.h"

namespace switchyard::c {

std::unique_ptr<Communicator> make_foreign_communicator(int rank, int size,
                                                        std::chrono::milliseconds timeout,
                                                        const switchyard_comm_functions& functions,
                                                        void* context);

}  // namespace switchyard::c
