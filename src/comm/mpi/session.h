// MPI's one lifetime in this process.
#pragma once

#include <memory>

namespace switchyard::mpi {

// Initialises MPI unless the caller has, and finalises it at the end only if it did so itself and
// no communicator failed: MPI_Finalize waits for every rank, dead ones too.
class Session {
 public:
  // The session of this process; all communicators share it.
  static std::shared_ptr<Session> join();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  bool owns_mpi() const { return owns_mpi_; }
  // Whether another thread may make a blocking MPI call while this one watches the clock.
  bool allows_threads() const { return allows_threads_; }
  void abandon() { abandoned_ = true; }

 private:
  Session();

  bool owns_mpi_ = false;
  bool allows_threads_ = false;
  bool abandoned_ = false;
};

}  // namespace switchyard::mpi
