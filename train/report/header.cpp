// SPDX-License-Identifier: Apache-2.0
// The report's title and key figures.
#include <fmt/format.h>

#include <cmath>

#include "report/numbers.h"
#include "report/sections.h"
#include "report/text.h"

namespace switchyard::train {
namespace {

// `value` and `about` are HTML.
std::string tile(const char* name, const std::string& value, const std::string& about) {
  return fmt::format(
      "<div class=\"tile\"><dt>{}</dt><dd class=\"value\">{}</dd><dd "
      "class=\"about\">{}</dd></div>\n",
      name, value, about);
}

std::string compared_with_bigram(const RunSummary& run) {
  if (run.history.held_out.empty()) return "not evaluated yet";
  if (!std::isfinite(run.held_out_loss)) return "<span class=\"bad\">not finite</span>";
  const double below = run.bigram_loss - run.held_out_loss;
  if (!std::isfinite(below)) return "nats per byte";
  return fmt::format("<span class=\"{}\">{} {}</span> bigram’s {}", below > 0 ? "good" : "bad",
                     loss_text(std::abs(below)), below > 0 ? "below" : "above",
                     loss_text(run.bigram_loss));
}

// Averages over the steps in the history: a resumed run has trained on more.
double tokens_a_second(const RunSummary& run) {
  double tokens = 0.0;
  run.history.for_each_step_record([&](const StepRecord& record, double num_steps) {
    tokens += record.tokens_per_second * record.seconds * num_steps;
  });
  const double seconds = run.history.seconds();
  return seconds > 0.0 ? tokens / seconds : std::nan("");
}

std::string tiles(const RunSummary& run) {
  const auto& steps = run.history.steps;
  const auto num_steps = static_cast<double>(run.history.num_steps());
  const auto num_parameters = static_cast<double>(run.parameters);
  const auto num_active = static_cast<double>(run.active_parameters);
  const bool is_evaluated = !run.history.held_out.empty();
  return tile("Held-out loss", is_evaluated ? loss_text(run.held_out_loss) : "–",
              compared_with_bigram(run)) +
         tile("Tokens trained", count_text(static_cast<double>(run.tokens)),
              whole_text(num_steps) + (run.history.num_steps() == 1 ? " step" : " steps")) +
         tile("Tokens a second", count_text(tokens_a_second(run)), "mean over the steps") +
         tile("Time", duration_text(run.seconds),
              duration_text(run.history.seconds() / num_steps) + " a step") +
         tile("Parameters", count_text(num_parameters),
              count_text(num_active) + " active for a token") +
         tile("Balance at the end", ratio_text(steps.empty() ? std::nan("") : steps.back().balance),
              "fullest expert / mean, worst layer, last step");
}

// Empty if the report does not know how many steps were planned.
std::string state_html(const RunSummary& run) {
  const auto done = whole_text(static_cast<double>(run.history.num_steps()));
  const auto planned = whole_text(static_cast<double>(run.planned_steps));
  if (run.planned_steps == 0) return "";
  switch (run.state) {
    case RunState::stopped:
      return fmt::format("<p class=\"bad\">Stopped by a signal after step {} of {}.</p>\n", done,
                         planned);
    case RunState::completed:
      return fmt::format("<p>Completed on {}.</p>\n", time_text(run.origin.written));
    case RunState::running:
      break;
  }
  return fmt::format("<p>Not finished: after step {} of {}, as of {}.</p>\n", done, planned,
                     time_text(run.origin.written));
}

}  // namespace

std::string header_html(const RunSummary& run) {
  return fmt::format(
      "<header><h1>Switchyard training run</h1><p>{}</p>\n{}<dl "
      "class=\"tiles\">\n{}</dl></header>\n",
      escaped(run.title), state_html(run), tiles(run));
}

}  // namespace switchyard::train
