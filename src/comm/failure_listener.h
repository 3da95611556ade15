// Objects over a communicator that other ranks may be waiting in, besides its collectives.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

class FailureListener {
 public:
  virtual ~FailureListener() = default;
  // This rank gives up, or knows of one that has. Called once, before the communicator tells the
  // other ranks.
  virtual void on_failure(std::string_view reason) noexcept = 0;
  // Whether nobody can be waiting any more.
  virtual bool is_over() const noexcept = 0;
};

// Those of a communicator and of all that were split off it. It keeps them: an error unwinds a
// rank's objects, and the communicators that were split off, before it reaches those who abort.
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
  static void tell(Communicator& comm, std::string_view reason) {
    for (const auto& listener : all(comm)) listener->on_failure(reason);
  }
  // Makes the communicator unusable on every rank, for a failure that was found elsewhere, and
  // throws.
  [[noreturn]] static void fail(Communicator& comm, const std::string& reason,
                                const std::vector<int>& culprits) {
    comm.give_up(reason, culprits);
    throw comm.make_error(reason, culprits);
  }
  // The same for an error of this rank, without a throw. The ranks that the error names are named
  // here too, by their numbers here.
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
  std::shared_ptr<FailureListeners> whole_;  // of the communicator that this was split off
};

}  // namespace switchyard
