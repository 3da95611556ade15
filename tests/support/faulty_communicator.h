// SPDX-License-Identifier: Apache-2.0
// Wraps a communicator so that something goes wrong at a chosen call.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard::testing {

enum class Fault {
  none,
  delay,      // the rank arrives late
  drop,       // its message is lost; it continues as if the call had completed (not in a split)
  duplicate,  // its message is sent twice (not in a split)
  corrupt,    // a bit flips in the integers that it sends
  throw_error,
  throw_other,  // throws something that is not a std::exception
  leave,        // the rank ends without telling anyone
  silence       // the rank never arrives and never says why
};
std::string name_of(Fault fault);
constexpr Fault kFaults[] = {Fault::delay,   Fault::drop,        Fault::duplicate,
                             Fault::corrupt, Fault::throw_error, Fault::throw_other,
                             Fault::leave,   Fault::silence};

// The fault of one rank, and the calls that it has made over its communicator and all that were
// split off it.
struct FaultPlan {
  Fault fault = Fault::none;
  int at_call = 0;                       // counted from 1
  std::function<void()> be_silent = {};  // returns once the other ranks have ended
  bool has_left = false;                 // set by leave and silence, which notify nobody
  std::vector<std::string> calls = {};   // "all_gather (i32)"
};

std::unique_ptr<Communicator> make_faulty(Communicator& base, std::shared_ptr<FaultPlan> plan);

}  // namespace switchyard::testing
