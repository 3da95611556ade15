// A communicator in which something goes wrong at a chosen call, around any other.
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
  delay,      // the rank comes late
  drop,       // its message is lost: it goes on as if the call were complete (not in a split)
  duplicate,  // its message goes out twice (not in a split)
  corrupt,    // a bit of the integers that it sends has flipped
  throw_error,
  throw_other,  // something that is not a std::exception
  leave,        // the rank ends without a word
  silence       // the rank never comes, and never says why
};
std::string name_of(Fault fault);
constexpr Fault kFaults[] = {Fault::delay,   Fault::drop,        Fault::duplicate,
                             Fault::corrupt, Fault::throw_error, Fault::throw_other,
                             Fault::leave,   Fault::silence};

// What goes wrong on one rank, and the calls it has made over its communicator and all that were
// split off it.
struct FaultPlan {
  Fault fault = Fault::none;
  int at_call = 0;                       // counted from 1
  std::function<void()> be_silent = {};  // returns when the others have ended
  bool has_left = false;                 // set by leave and silence; the rank tells nobody
  std::vector<std::string> calls = {};   // "all_gather (i32)"
};

std::unique_ptr<Communicator> make_faulty(Communicator& base, std::shared_ptr<FaultPlan> plan);

}  // namespace switchyard::testing
