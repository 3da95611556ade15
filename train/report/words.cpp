// SPDX-License-Identifier: Apache-2.0
// The report's free text: the sample and the configuration.
#include <fmt/format.h>

#include "report/sections.h"
#include "report/text.h"

namespace switchyard::train {

std::string sample_html(const RunSummary& run) {
  if (run.prompt.empty() && run.sample.empty()) return "";
  return fmt::format(
      "<p class=\"note\">The prompt, in bold, and the model’s "
      "continuation.</p>\n<pre><b>{}</b>{}</pre>\n",
      escaped(run.prompt), escaped(run.sample));
}

std::string configuration_html(const RunSummary& run) {
  if (run.configuration.empty()) return "";
  std::string html = "<dl class=\"settings\">\n";
  for (const auto& [name, value] : run.configuration) {
    html += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name),
                        value.empty() ? "–" : escaped(value));
  }
  return html + "</dl>\n";
}

}  // namespace switchyard::train
