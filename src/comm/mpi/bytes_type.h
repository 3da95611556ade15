// An MPI datatype for any number of bytes.
#pragma once

#include <mpi.h>

#include <cstdint>

namespace switchyard::mpi {

// One element of `bytes` bytes; beyond 2³¹ too, where MPI's own counts end. The caller frees it.
MPI_Datatype make_bytes_type(std::int64_t bytes);

}  // namespace switchyard::mpi
