// switchyard inspect: what a checkpoint holds, and what each rank would read of it.
#pragma once

#include <string>

namespace switchyard::cli {

struct InspectOptions {
  std::string path;
  int num_ranks = 0;  // 0: nothing is said of ranks
  bool all = false;   // nothing is folded
  bool json = false;
};

void inspect(const InspectOptions& options);

}  // namespace switchyard::cli
