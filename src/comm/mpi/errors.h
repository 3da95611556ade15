// MPI's errors: codes that become exceptions, and not the end of the process.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::mpi {

// "MPI_Testall failed: MPI_ERR_TRUNCATE: message truncated".
std::string error_text(int code, std::string_view function);

// Throws that as a CommunicationError unless the code is MPI_SUCCESS.
void check_call(int code, std::string_view function);

// While one lives, MPI returns codes. It asks the world's handler about all that belongs to no
// communicator, and Open MPI even about a collective under way on another one; that handler may be
// the caller's own, so it is restored when the last instance in any thread is gone.
class ReturnedErrors {
 public:
  ReturnedErrors();
  ~ReturnedErrors();
  ReturnedErrors(const ReturnedErrors&) = delete;
  ReturnedErrors& operator=(const ReturnedErrors&) = delete;
};

}  // namespace switchyard::mpi
