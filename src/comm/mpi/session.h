// SPDX-License-Identifier: Apache-2.0
// The lifetime of MPI in this process.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "comm/mpi/roll_call.h"
#include "switchyard/communicator.h"

namespace switchyard::mpi {

// Initialises MPI unless the caller has. Finalises it at the end only if it initialised it itself
// and all ranks are there to do the same: MPI_Finalize waits for every rank, without a timeout.
class Session {
 public:
  // Returns the session of this process, which all communicators share. The first call initialises
  // MPI as `options` say.
  static std::shared_ptr<Session> join(const ConnectOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // The farewell communicator spans all ranks. Its only use is to check that all are still there
  // before MPI is finalised.
  bool needs_farewell() const { return owns_mpi_ && farewell_ == nullptr; }
  void set_farewell(std::unique_ptr<Communicator> world) { farewell_ = std::move(world); }
  // Null if the members of the job are not known.
  const std::shared_ptr<RollCall>& roll_call() const { return roll_call_; }
  // True if another thread may make a blocking MPI call while this one watches the clock.
  bool allows_threads() const { return allows_threads_; }
  // Records that a communicator failed; MPI is then not finalised.
  void abandon() { abandoned_ = true; }

 private:
  explicit Session(const ConnectOptions& options);

  bool owns_mpi_ = false;
  bool allows_threads_ = false;
  std::atomic<bool> abandoned_ = false;
  std::shared_ptr<RollCall> roll_call_;
  std::unique_ptr<Communicator> farewell_;
};

}  // namespace switchyard::mpi
