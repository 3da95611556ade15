// SPDX-License-Identifier: Apache-2.0
// Stands in for the MPI backend in builds without MPI.
#include "comm/backends.h"
#include "switchyard/error.h"

namespace switchyard::mpi {

BackendEntry backend() {
  return {"mpi",
          [] {
            return Availability{false,
                                "this build has no MPI (install libopenmpi-dev and configure with "
                                "-DSWITCHYARD_MPI=ON)"};
          },
          [](const ConnectOptions&) -> std::unique_ptr<Communicator> {
            throw Unsupported("this build has no MPI");
          }};
}

}  // namespace switchyard::mpi
