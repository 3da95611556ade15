// SPDX-License-Identifier: Apache-2.0
// Where the report comes from: date, machine, program, text, memory and interruptions.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "report/numbers.h"
#include "report/sections.h"
#include "report/text.h"

namespace switchyard::train {
namespace {

constexpr std::size_t kMostResumesShown = 8;

// Returns nothing if the value is not known.
std::string line(const char* name, const std::string& value) {
  if (value.empty()) return "";
  return fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, escaped(value));
}

std::string program_text(const RunOrigin& origin) {
  if (origin.version.empty()) return "";
  return fmt::format("Switchyard {}, commit {}", origin.version,
                     origin.commit.empty() ? "unknown" : origin.commit);
}

std::string corpus_text(const RunOrigin& origin) {
  if (origin.text.empty()) return "";
  return fmt::format("{}: {} to train on, {} held out", origin.text,
                     bytes_text(static_cast<double>(origin.training_bytes)),
                     bytes_text(static_cast<double>(origin.held_out_bytes)));
}

// The sum of the processes' peaks counts what they share once for each of them.
std::string memory_text(const std::vector<std::int64_t>& peak_bytes) {
  if (peak_bytes.empty() || std::ranges::max(peak_bytes) == 0) return "";
  auto largest = bytes_text(static_cast<double>(std::ranges::max(peak_bytes)));
  if (peak_bytes.size() == 1) return largest;
  const auto sum = std::accumulate(peak_bytes.begin(), peak_bytes.end(), 0.0);
  return fmt::format("{} over {} processes, {} in the largest", bytes_text(sum), peak_bytes.size(),
                     largest);
}

std::string resumes_text(const std::vector<ResumeRecord>& resumes) {
  std::string text;
  const auto first = resumes.size() - std::min(resumes.size(), kMostResumesShown);
  for (std::size_t i = first; i < resumes.size(); ++i) {
    text +=
        fmt::format("{}after step {} ({})", text.empty() ? "" : ", ",
                    whole_text(static_cast<double>(resumes[i].step)), time_text(resumes[i].time));
  }
  return first == 0 ? text : fmt::format("{} times before, then {}", first, text);
}

std::string stop_text(const RunSummary& run) {
  if (run.state != RunState::stopped) return "";
  return fmt::format("after step {} ({})", whole_text(static_cast<double>(run.history.num_steps())),
                     time_text(run.origin.written));
}

}  // namespace

std::string origin_html(const RunSummary& run) {
  const RunOrigin& origin = run.origin;
  const auto lines =
      line("Started", origin.began == 0 ? "" : time_text(origin.began)) +
      line("Resumed", resumes_text(run.history.resumes)) + line("Stopped", stop_text(run)) +
      line("Report written", origin.written == 0 ? "" : time_text(origin.written)) +
      line("Host", origin.hosts) + line("CPU", origin.processor) +
      line("Program", program_text(origin)) + line("Command", origin.command_line) +
      line("Text", corpus_text(origin)) + line("Peak memory", memory_text(origin.peak_bytes));
  return lines.empty() ? "" : "<dl class=\"origin\">\n" + lines + "</dl>\n";
}

}  // namespace switchyard::train
