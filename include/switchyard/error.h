// The exceptions that cross the library's boundary. Every message names the values involved.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

class SWITCHYARD_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something the contract does not allow.
class SWITCHYARD_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A sound request that this build, backend or machine cannot serve.
class SWITCHYARD_API Unsupported : public Error {
 public:
  using Error::Error;
};

// A collective that could not be completed. The communicator it came from is unusable afterwards.
class SWITCHYARD_API CommunicationError : public Error {
 public:
  explicit CommunicationError(const std::string& message, std::vector<int> ranks = {})
      : Error(message), ranks_(std::move(ranks)), world_ranks_(ranks_) {}

  // The ranks that died, gave up or did not arrive, as the communicator numbers them; empty where
  // that cannot be known.
  const std::vector<int>& ranks() const { return ranks_; }
  // The same ranks as the communicator numbers them that this one was split off from, directly or
  // not.
  const std::vector<int>& world_ranks() const { return world_ranks_; }

 private:
  friend class Communicator;

  std::vector<int> ranks_;
  std::vector<int> world_ranks_;
  std::weak_ptr<const void> world_;  // whose numbers those are
};

// A file could not be written, or lost bytes while it was read.
class SWITCHYARD_API StorageError : public Error {
 public:
  using Error::Error;
};

// A device, its driver or its memory failed.
class SWITCHYARD_API DeviceError : public Error {
 public:
  using Error::Error;
};

// A broken invariant of the library: always our bug.
class SWITCHYARD_API InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace switchyard
