// SPDX-License-Identifier: Apache-2.0
// A caller that initialises and finalises MPI itself: the library must leave that to it, before and
// after a failure. Exits with 0 if all is well.
#include <mpi.h>

#include <cstdio>
#include <string>
#include <vector>

#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

bool mpi_is_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

void sum_ranks() {
  const auto comm = connect({.backend = "mpi", .timeout = std::chrono::seconds(20)});
  Tensor sum = Tensor::from<std::int32_t>({1}, {comm->rank() + 1});
  comm->all_reduce(sum);
  expect(sum.span<std::int32_t>()[0] == comm->size() * (comm->size() + 1) / 2, "the sum is right");
}

int errors_of_the_caller = 0;
void count_error(MPI_Comm* /*comm*/, int* /*code*/, ...) { ++errors_of_the_caller; }

// The caller's handler hears nothing of errors that are not the caller's, and stays.
void bring_other_sizes() {
  MPI_Errhandler own = MPI_ERRHANDLER_NULL;
  MPI_Comm_create_errhandler(count_error, &own);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, own);
  const auto comm = connect({.backend = "mpi", .timeout = std::chrono::seconds(20)});
  const std::int64_t n = comm->rank() == 0 ? 4 : 2;
  Tensor values = Tensor::zeros({n}, Dtype::f32);
  std::string message;
  try {
    comm->broadcast(values, 0);
    comm->barrier();
  } catch (const CommunicationError& error) {
    message = error.what();
  }
  expect(message.find(" bytes, but rank ") != std::string::npos, "sizes that differ are named");
  expect(errors_of_the_caller == 0, "the caller's handler was not called");
  MPI_Comm_call_errhandler(MPI_COMM_WORLD, MPI_ERR_OTHER);
  expect(errors_of_the_caller == 1, "the caller's handler is the world's again");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&own);
}

// More rows than MPI can count, of no bytes each: refused by name, on a group of its own.
void send_too_many_rows() {
  const auto comm = connect({.backend = "mpi", .timeout = std::chrono::seconds(20)});
  const std::int64_t rows = std::int64_t{1} << 32;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(comm->size()), 0);
  counts[static_cast<std::size_t>(comm->rank())] = rows;
  Tensor nothing({rows, 0}, Dtype::f32);
  std::string message;
  try {
    comm->all_to_all(nothing, counts, nothing, counts);
  } catch (const Unsupported& error) {
    message = error.what();
  }
  expect(message.find("4294967296 rows are too many for one all_to_all") == 0,
         "too many rows are refused");
  try {
    comm->barrier();
    expect(false, "a failed communicator refuses further calls");
  } catch (const CommunicationError&) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  sum_ranks();
  sum_ranks();  // and again: the first left MPI as it was
  expect(!mpi_is_finalized(), "MPI is not finalised while its caller needs it");
  send_too_many_rows();
  bring_other_sizes();
  sum_ranks();  // a new communicator works after another one failed
  MPI_Finalize();
  try {
    (void)connect({.backend = "mpi"});
    expect(false, "MPI cannot be used after it was finalised");
  } catch (const Unsupported& error) {
    std::printf("%s\n", error.what());
  }
  return failures == 0 ? 0 : 1;
}
