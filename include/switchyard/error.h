// SPDX-License-Identifier: Apache-2.0
// The exceptions that the library throws. Every message names the values involved.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

// The base of every error that the library throws on purpose.
class SWITCHYARD_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if an argument violates the contract of a function.
class SWITCHYARD_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// Thrown if a valid request cannot be served by this build, backend or machine.
class SWITCHYARD_API Unsupported : public Error {
 public:
  using Error::Error;
};

// Thrown if a collective could not be completed. The communicator is unusable afterwards.
class SWITCHYARD_API CommunicationError : public Error {
 public:
  explicit CommunicationError(const std::string& message, std::vector<int> ranks = {})
      : Error(message), ranks_(std::move(ranks)), world_ranks_(ranks_) {}

  // The ranks that died, gave up or did not arrive, numbered as in the communicator. Empty if they
  // cannot be known.
  const std::vector<int>& ranks() const { return ranks_; }
  // The same ranks, numbered as in the world: the root communicator that this one was split off
  // from, directly or indirectly.
  const std::vector<int>& world_ranks() const { return world_ranks_; }

 private:
  friend class Communicator;

  std::vector<int> ranks_;
  std::vector<int> world_ranks_;
  std::weak_ptr<const void> world_;  // the world that world_ranks_ refers to
};

// Thrown if a file could not be written, or was truncated while it was being read.
class SWITCHYARD_API StorageError : public Error {
 public:
  using Error::Error;
};

// Thrown if a device, its driver or its memory failed.
class SWITCHYARD_API DeviceError : public Error {
 public:
  using Error::Error;
};

// Thrown if an invariant of the library is broken, which is always a bug in the library.
class SWITCHYARD_API InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace switchyard
