// SPDX-License-Identifier: Apache-2.0
// Turns MPI's error codes into exceptions, and keeps MPI from ending the process.
#pragma once

#include <string>
#include <string_view>

#include "core/without_signals.h"

namespace switchyard::mpi {

// Returns text such as "MPI_Testall failed: MPI_ERR_TRUNCATE: message truncated".
std::string error_text(int code, std::string_view function);

// Throws a CommunicationError with that text unless `code` is MPI_SUCCESS.
void check_call(int code, std::string_view function);

// While an instance lives, MPI returns error codes. MPI uses the world's handler for errors outside
// any communicator, and Open MPI uses it even for a collective under way on another one. That
// handler may be the caller's, so the last instance in any thread restores it.
class ReturnedErrors {
 public:
  ReturnedErrors();
  ~ReturnedErrors();
  ReturnedErrors(const ReturnedErrors&) = delete;
  ReturnedErrors& operator=(const ReturnedErrors&) = delete;

 private:
  WithoutBrokenPipes without_broken_pipes_;  // Open MPI writes to connections of dead ranks
};

}  // namespace switchyard::mpi
