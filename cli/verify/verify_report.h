// SPDX-License-Identifier: Apache-2.0
// The output of verify: a table for people, or one JSON object per line.
#pragma once

#include <string>
#include <vector>

#include "verify/golden_run.h"

namespace switchyard::cli {

// One case: its runs, or the reason why it was skipped.
struct CaseReport {
  struct Run {
    int num_ranks = 0;
    std::string variant;
    GoldenRun result;
  };

  std::string name;
  std::vector<Run> runs = {};
  std::string skipped = {};

  bool passed() const;
  bool failed() const { return !runs.empty() && !passed(); }
};

// True if at least one case ran and none failed.
bool all_passed(const std::vector<CaseReport>& cases);

void print_verify_table(const std::vector<CaseReport>& cases);
void print_verify_json(const std::vector<CaseReport>& cases);

}  // namespace switchyard::cli
