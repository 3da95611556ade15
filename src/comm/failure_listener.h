// SPDX-License-Identifier: Apache-2.0
// Listeners that learn when a communicator fails: objects outside its collectives in which other
// ranks may be waiting.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

class FailureListener {
 public:
  virtual ~FailureListener() = default;
  // Called once, when this rank gives up or learns that another has, before the communicator tells
  // the other ranks. `world_ranks` are at fault, by their numbers in the job.
  virtual void on_failure(std::string_view reason, std::span<const int> world_ranks) noexcept = 0;
  // True if no rank can still be waiting.
  virtual bool is_over() const noexcept = 0;
};

// The listeners of a communicator and of all that were split off it. They are kept alive here: an
// error destroys a rank's objects and split-off communicators before it reaches the code that
// aborts.
class FailureListeners {
 public:
  static void add(Communicator& comm, const std::shared_ptr<FailureListener>& listener) {
    for (auto* at = of(comm).get(); at != nullptr; at = at->whole_.get()) {
      std::erase_if(at->all_, [](const auto& old) { return old->is_over(); });
      at->all_.push_back(listener);
    }
  }
  static const std::vector<std::shared_ptr<FailureListener>>& all(Communicator& comm) {
    return of(comm)->all_;
  }
  static void split_off(Communicator& whole, Communicator& part) { of(part)->whole_ = of(whole); }
  static void tell(Communicator& comm, std::string_view reason, std::span<const int> world_ranks) {
    for (const auto& listener : all(comm)) listener->on_failure(reason, world_ranks);
  }
  // Translates numbers in the job to numbers in the communicator, as fail() takes them.
  static std::vector<int> ranks_in(const Communicator& comm, const std::vector<int>& world_ranks) {
    return comm.ranks_here(world_ranks);
  }
  // Makes the communicator unusable on every rank because of a failure found elsewhere, and throws.
  [[noreturn]] static void fail(Communicator& comm, const std::string& reason,
                                const std::vector<int>& culprits) {
    comm.give_up(reason, culprits);
    throw comm.make_error(reason, culprits);
  }
  // Like fail(), for an error of this rank, but does not throw. Blames the ranks that the error
  // names, translated to their numbers in this communicator.
  static void abort_for(Communicator& comm, const std::string& reason,
                        const std::exception& error) {
    comm.give_up_for(reason, error);
  }

 private:
  static std::shared_ptr<FailureListeners>& of(Communicator& comm) {
    if (comm.listeners_ == nullptr) comm.listeners_ = std::make_shared<FailureListeners>();
    return comm.listeners_;
  }

  std::vector<std::shared_ptr<FailureListener>> all_;
  std::shared_ptr<FailureListeners> whole_;  // listeners of the communicator that was split
};

}  // namespace switchyard
