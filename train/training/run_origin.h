// SPDX-License-Identifier: Apache-2.0
// Where a run takes place and what it uses, for its report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::train {

// The load of one rank in the MoE layers.
struct RankUse {
  std::int64_t rows = 0;        // received for its experts
  double waited_seconds = 0.0;  // for `waited_for`
  int waited_for = 0;           // the rank that it waited for longest; itself if it never waited
};

// Times are seconds since 1970. Empty texts and zeros stand for what is not known.
struct RunOrigin {
  std::int64_t began = 0;    // this part of the run, if it was resumed
  std::int64_t written = 0;  // the report
  std::string hosts;         // "node1", or "node1 (4 ranks), node2 (4 ranks)"
  std::string processor;     // of rank 0
  std::string version;
  std::string commit;
  std::string command_line;
  std::string text;  // its name
  std::int64_t training_bytes = 0;
  std::int64_t held_out_bytes = 0;
  std::vector<std::int64_t> peak_bytes;  // memory of each process
};

}  // namespace switchyard::train
