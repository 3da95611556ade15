// SPDX-License-Identifier: Apache-2.0
#include "verify/verify_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/printable.h"
#include "json_line.h"

namespace switchyard::cli {
namespace {

using nlohmann::json;
using train::printable;

struct Totals {
  explicit Totals(const std::vector<CaseReport>& cases) {
    for (const CaseReport& c : cases) {
      passed += c.passed() ? 1 : 0;
      failed += c.failed() ? 1 : 0;
      skipped += c.skipped.empty() ? 0 : 1;
      runs += c.runs.size();
    }
  }

  int passed = 0;
  int failed = 0;
  int skipped = 0;
  std::size_t runs = 0;
};

std::string error_text(const Comparison& c) {
  if (c.tensor == "expert_ids") return fmt::format("{} differ", c.error);
  if (c.error == 0.0) return "0";
  return c.recorded > 0.0 ? fmt::format("{:.1e}", c.error / c.recorded) : "not zero";
}

std::string verdict(const Comparison& c) {
  if (c.ok()) return c.by_floor ? "ok, rounding of zero" : "ok";
  return c.rank ? fmt::format("FAILED on rank {}", *c.rank) : "FAILED";
}

void print_run(const std::string& name, const CaseReport::Run& run) {
  const auto head = fmt::format("{:<21} {:>5}  {:<25}", name, run.num_ranks, run.variant);
  if (!run.result.error.empty()) {
    fmt::print("{}  FAILED: {}\n", head, printable(run.result.error));
    return;
  }
  for (const Comparison& c : run.result.comparisons) {
    fmt::print("{}  {:<35} {:>14}  {}\n", head, c.tensor, error_text(c), verdict(c));
  }
}

json to_json(const std::string& name, const CaseReport::Run& run) {
  return {{"case", name}, {"ranks", run.num_ranks}, {"variant", run.variant}};
}

json to_json(json line, const Comparison& c) {
  line["tensor"] = c.tensor;
  line["rank"] = c.rank ? json(*c.rank) : json(nullptr);
  line["error"] = c.error;
  line["recorded"] = c.recorded;
  line["relative_error"] = c.recorded > 0.0 ? json(c.error / c.recorded) : json(nullptr);
  line["allowed"] = c.allowed;
  line["ok"] = c.ok();
  return line;
}

}  // namespace

bool CaseReport::passed() const {
  return !runs.empty() &&
         std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.result.ok(); });
}

bool all_passed(const std::vector<CaseReport>& cases) {
  const Totals totals(cases);
  return totals.passed > 0 && totals.failed == 0;
}

void print_verify_table(const std::vector<CaseReport>& cases) {
  fmt::print("{:<21} {:>5}  {:<25}  {:<35} {:>14}\n", "case", "ranks", "variant", "tensor",
             "relative error");
  for (const CaseReport& c : cases) {
    for (const auto& run : c.runs) print_run(printable(c.name), run);
    if (!c.skipped.empty()) fmt::print("{:<21} skipped: {}\n", printable(c.name), c.skipped);
  }
  const Totals totals(cases);
  fmt::print("\nCases passed: {}, failed: {}, skipped: {}. Runs: {}.\n", totals.passed,
             totals.failed, totals.skipped, totals.runs);
}

void print_verify_json(const std::vector<CaseReport>& cases) {
  for (const CaseReport& c : cases) {
    for (const auto& run : c.runs) {
      auto line = to_json(c.name, run);
      for (const Comparison& comparison : run.result.comparisons) {
        print_json_line(to_json(line, comparison));
      }
      if (run.result.error.empty()) continue;
      line.update({{"message", run.result.error}, {"ok", false}});
      print_json_line(line);
    }
    if (!c.skipped.empty()) print_json_line({{"case", c.name}, {"skipped", c.skipped}});
  }
  const Totals totals(cases);
  print_json_line({{"passed", totals.passed},
                   {"failed", totals.failed},
                   {"skipped", totals.skipped},
                   {"runs", totals.runs}});
}

}  // namespace switchyard::cli
