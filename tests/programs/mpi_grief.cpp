// SPDX-License-Identifier: Apache-2.0
// Stands between a program and MPI: the n-th call of a function is where a rank comes to grief.
//   SWITCHYARD_GRIEF="FUNCTION N RANK SIGNAL"
// Linked into a test program, or preloaded into the command.
#include <mpi.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

struct Grief {
  std::string function;
  int call = 0;
  int rank = -1;
  int signal = 0;
};

const Grief& grief() {
  static const Grief found = [] {
    Grief result;
    const char* const text = std::getenv("SWITCHYARD_GRIEF");
    const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
    if (text == nullptr || rank == nullptr) return result;
    std::istringstream(text) >> result.function >> result.call >> result.rank >> result.signal;
    if (std::atoi(rank) != result.rank) result.function.clear();
    return result;
  }();
  return found;
}

void before(const std::string& function) {
  static std::atomic<int> calls = 0;
  if (function == grief().function && ++calls == grief().call) ::raise(grief().signal);
}

}  // namespace

extern "C" {

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  before("MPI_Init_thread");
  return PMPI_Init_thread(argc, argv, required, provided);
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* copy, MPI_Request* request) {
  before("MPI_Comm_idup");
  return PMPI_Comm_idup(comm, copy, request);
}

int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
  before("MPI_Comm_split");
  return PMPI_Comm_split(comm, color, key, part);
}

int MPI_Iallgather(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                   int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  before("MPI_Iallgather");
  return PMPI_Iallgather(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}

int MPI_Ialltoall(const void* send, int send_count, MPI_Datatype send_type, void* recv,
                  int recv_count, MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  before("MPI_Ialltoall");
  return PMPI_Ialltoall(send, send_count, send_type, recv, recv_count, recv_type, comm, request);
}

int MPI_Ialltoallv(const void* send, const int* send_counts, const int* send_offsets,
                   MPI_Datatype send_type, void* recv, const int* recv_counts,
                   const int* recv_offsets, MPI_Datatype recv_type, MPI_Comm comm,
                   MPI_Request* request) {
  before("MPI_Ialltoallv");
  return PMPI_Ialltoallv(send, send_counts, send_offsets, send_type, recv, recv_counts,
                         recv_offsets, recv_type, comm, request);
}

int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  before("MPI_Ibcast");
  return PMPI_Ibcast(data, count, type, root, comm, request);
}

int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  before("MPI_Ibarrier");
  return PMPI_Ibarrier(comm, request);
}

}  // extern "C"
