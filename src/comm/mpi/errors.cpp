// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/errors.h"

#include <mpi.h>

#include <mutex>

#include "core/require.h"
#include "switchyard/error.h"

namespace switchyard::mpi {
namespace {

// There is one MPI_COMM_WORLD per process, and so one error handler for it.
std::mutex g_mutex;
int g_users = 0;
MPI_Errhandler g_before = MPI_ERRHANDLER_NULL;

}  // namespace

std::string error_text(int code, std::string_view function) {
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) length = 0;
  text.resize(static_cast<std::size_t>(length));
  return fmt::format("{} failed: {}", function, text.empty() ? fmt::format("code {}", code) : text);
}

void check_call(int code, std::string_view function) {
  if (code != MPI_SUCCESS) throw CommunicationError(error_text(code, function));
}

ReturnedErrors::ReturnedErrors() {
  const std::scoped_lock lock(g_mutex);
  if (g_users++ > 0) return;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &g_before);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

ReturnedErrors::~ReturnedErrors() {
  const std::scoped_lock lock(g_mutex);
  if (--g_users > 0) return;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, g_before);
  MPI_Errhandler_free(&g_before);
}

}  // namespace switchyard::mpi
