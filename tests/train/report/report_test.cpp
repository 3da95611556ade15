// SPDX-License-Identifier: Apache-2.0
#include "report/report.h"

#include <gtest/gtest.h>

#include <cctype>
#include <limits>
#include <string>
#include <string_view>

#include "train/report/markup.h"
#include "train/report/synthetic_run.h"

namespace switchyard::train::report_test {
namespace {

using testing::Markup;
using testing::markup_of;
using testing::synthetic_run;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// "nan" or "inf" as a word of its own.
bool has_number_that_is_none(std::string_view text) {
  std::string word;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const int c = i < text.size() ? std::tolower(static_cast<unsigned char>(text[i])) : ' ';
    if (c >= 'a' && c <= 'z') {
      word += static_cast<char>(c);
    } else {
      if (word == "nan" || word == "inf") return true;
      word.clear();
    }
  }
  return false;
}

// Checks what holds for the report of every run.
Markup checked(const std::string& html) {
  const auto markup = markup_of(html);
  EXPECT_EQ(markup.problem, "");
  for (const char* address : {"http://", "https://", "@import", "url("}) {
    EXPECT_FALSE(contains(html, address)) << address;
  }
  for (const auto& element : markup.elements) {
    for (const auto& [name, value] : element.attributes) {
      if (name == "src") {
        EXPECT_EQ(value.substr(0, 22), "data:image/png;base64,");
      } else {
        EXPECT_FALSE(has_number_that_is_none(value)) << name << "=" << value;
      }
    }
  }
  EXPECT_FALSE(has_number_that_is_none(markup.text)) << markup.text;
  return markup;
}

TEST(Report, HasEveryPartInOrder) {
  const auto markup = checked(report_html(synthetic_run()));
  std::vector<std::string> sections;
  for (const auto& element : markup.elements) {
    if (element.name == "section") sections.push_back(element.attributes.at("id"));
  }
  EXPECT_EQ(sections, (std::vector<std::string>{"loss", "load", "ranks", "stages", "bytes",
                                                "progress", "sample", "configuration", "origin"}));
  EXPECT_EQ(markup.count("svg"), 4U);
  EXPECT_EQ(markup.count("img"), 4U);
}

TEST(Report, SaysTheKeyFigures) {
  const auto text = checked(report_html(synthetic_run())).text;
  for (const char* part : {"Switchyard training run",
                           "4 ranks: ep 4",
                           "1.642",
                           "0.871 below bigram’s 2.513",
                           "1.64 M",
                           "400 steps",
                           "13.9 k",
                           "2 min 1 s",
                           "295 ms a step",
                           "3.42 M",
                           "1.21 M active for a token",
                           "1.15",
                           "64.0 % of the ranks’ time is in matrix products",
                           "121 ms",
                           "47.2 GFLOP/s",
                           "52.1 %",
                           "95 ms",
                           "6.71 GB",
                           "16.8 MB",
                           "8.79 GB between ranks in all",
                           "training, mean of 17 steps",
                           "bigram 2.513",
                           "× of an even share",
                           "Layer 7",
                           "int rows = 3;"}) {
    EXPECT_TRUE(contains(text, part)) << part;
  }
  EXPECT_FALSE(contains(text, "ran again"));
  EXPECT_FALSE(contains(text, "not finite"));
}

TEST(Report, PointsOutWhatIsWrong) {
  auto run = synthetic_run();
  run.held_out_loss = 2.6;
  run.history.steps[3].ran_again = 1;
  for (std::size_t i = 300; i < 400; ++i) run.history.steps[i].loss = i % 2 == 0 ? kNan : kInfinity;
  const auto text = checked(report_html(run)).text;
  EXPECT_TRUE(contains(text, "0.087 above bigram’s 2.513"));
  EXPECT_TRUE(contains(text, "1 step ran again because bounded buffers overflowed"));
  EXPECT_TRUE(contains(text, "The training loss was not finite in 100 steps, first at step 301"));
}

TEST(Report, SaysWhereItComesFrom) {
  const auto text = checked(report_html(synthetic_run())).text;
  for (const char* part :
       {"Completed on 2026-11-18 11:08 UTC.", "Started2026-11-18 11:06 UTC",
        "Report written2026-11-18 11:08 UTC", "Hostnode1 (2 ranks), node2 (2 ranks)",
        "CPUA CPU, 8 hardware threads", "ProgramSwitchyard 1.2.3, commit 0123abcd",
        "Commandswitchyard train --prompt &#39;// &#39;",
        "Textsome text: 900 kB to train on, 100 kB held out",
        "Peak memory500 MB over 2 processes, 300 MB in the largest"}) {
    EXPECT_TRUE(contains(text, part)) << part;
  }
  EXPECT_FALSE(contains(text, "Stopped"));
  EXPECT_FALSE(contains(text, "Resumed"));
}

TEST(Report, ACommitThatIsNotKnownIsUnknown) {
  auto run = synthetic_run();
  run.origin.commit = "";
  run.origin.peak_bytes = {300'000'000};
  const auto text = checked(report_html(run)).text;
  EXPECT_TRUE(contains(text, "Switchyard 1.2.3, commit unknown"));
  EXPECT_TRUE(contains(text, "Peak memory300 MB\n"));
}

TEST(Report, SaysTheLoadAndTheWaitsOfRanks) {
  auto run = synthetic_run();
  const auto text = checked(report_html(run)).text;
  EXPECT_TRUE(contains(text, "rank 1200–\nrank 01005 ms for rank 1\n"))
      << text;  // the fullest first
  run.ranks.resize(40, {.rows = 10});
  const auto many = checked(report_html(run)).text;
  EXPECT_TRUE(contains(many, "These are the 32 ranks with the most rows, of 40."));
  EXPECT_TRUE(contains(many, "rank 31"));
  EXPECT_FALSE(contains(many, "rank 32"));
  run.measured_steps = 0;
  EXPECT_FALSE(contains(checked(report_html(run)).text, "rows a step"));
}

TEST(Report, AStoppedRunIsMarkedAsStopped) {
  auto run = synthetic_run({.steps = 120});
  run.planned_steps = 1000;
  run.state = RunState::stopped;
  const auto html = report_html(run);
  const auto text = checked(html).text;
  EXPECT_TRUE(contains(html, "<p class=\"bad\">Stopped by a signal after step 120 of 1,000.</p>"));
  EXPECT_TRUE(contains(text, "Stoppedafter step 120 (2026-11-18 11:08 UTC)"));
  EXPECT_FALSE(contains(text, "Completed"));
}

TEST(Report, ARunThatGoesOnIsNotFinished) {
  auto run = synthetic_run({.steps = 120});
  run.planned_steps = 1000;
  run.state = RunState::running;
  EXPECT_TRUE(contains(checked(report_html(run)).text,
                       "Not finished: after step 120 of 1,000, as of 2026-11-18 11:08 UTC."));
}

TEST(Report, SaysWhereTheRunWasResumed) {
  auto run = synthetic_run();
  run.history.resumes = {{.step = 100, .time = 1'795'000'000}, {.step = 250, .time = 0}};
  EXPECT_TRUE(contains(checked(report_html(run)).text,
                       "Resumedafter step 100 (2026-11-18 11:06 UTC), after step 250 (–)"));
  for (std::int64_t step = 251; step <= 260; ++step) run.history.resumes.push_back({step, 0});
  EXPECT_TRUE(
      contains(checked(report_html(run)).text, "Resumed4 times before, then after step 253 (–)"));
}

TEST(Report, EverythingFromOutsideIsEscaped) {
  const std::string evil = "</script></pre><script>alert(1)</script>\"'&\xFF\x1B";
  auto run = synthetic_run();
  const auto plain = checked(report_html(run));
  run.title = run.prompt = run.sample = evil;
  run.configuration = {{evil, evil}};
  run.stages = {{evil, 1.0}};
  run.bytes = {{evil, 1}};
  run.origin.hosts = run.origin.processor = run.origin.command_line = run.origin.text = evil;
  run.origin.version = run.origin.commit = evil;
  const auto html = report_html(run);
  const auto markup = checked(html);
  EXPECT_EQ(markup.count("script"), plain.count("script"));
  EXPECT_EQ(markup.count("script"), 1U);
  const std::string shown =
      "&lt;/script&gt;&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;\uFFFD␛";
  std::size_t count = 0;
  for (auto at = html.find(shown); at != std::string::npos; at = html.find(shown, at + 1)) ++count;
  EXPECT_EQ(count, 14U);  // the title is there twice
}

TEST(Report, OfARunThatWasResumed) {
  auto run = synthetic_run();
  EXPECT_FALSE(contains(checked(report_html(run)).text, "resumed"));
  run.measured_steps = 100;  // of 400
  const auto text = checked(report_html(run)).text;
  EXPECT_TRUE(contains(text, "Over the 100 steps since the run was resumed."));
  EXPECT_TRUE(contains(text, "280 ms"));  // 28 s of attention
}

TEST(Report, BeforeTheFirstEvaluation) {
  auto run = synthetic_run();
  run.history.held_out = {};
  run.held_out_loss = 0.0;
  EXPECT_TRUE(contains(checked(report_html(run)).text, "not evaluated yet"));
}

TEST(Report, OfNothing) {
  const auto markup = checked(report_html({}));
  EXPECT_EQ(markup.count("section"), 0U);
  EXPECT_TRUE(contains(markup.text, "0 steps"));
}

TEST(Report, OfOneStep) {
  const auto markup = checked(report_html(synthetic_run({.steps = 1})));
  EXPECT_EQ(markup.count("svg"), 4U);
  EXPECT_TRUE(contains(markup.text, "1 step"));
  EXPECT_FALSE(contains(markup.text, "1 steps"));
}

TEST(Report, OfStagesAndBytesWithoutSteps) {
  auto run = synthetic_run();
  run.history = {};
  const auto markup = checked(report_html(run));
  EXPECT_EQ(markup.count("svg"), 0U);
  EXPECT_TRUE(contains(markup.text, "attention"));
}

TEST(Report, OfNumbersThatAreNone) {
  for (const double value : {kNan, kInfinity, -kInfinity, 1e308, -1e308, 0.0}) {
    SCOPED_TRACE(value);
    auto run = synthetic_run({.steps = 60});
    run.held_out_loss = run.bigram_loss = run.seconds = value;
    for (auto& rank : run.ranks) rank.waited_seconds = value;
    for (auto& stage : run.stages) stage.seconds = value;
    for (auto& record : run.history.held_out) record.loss = value;
    for (auto& record : run.history.steps) {
      record.loss = record.gradient_norm = record.seconds = record.tokens_per_second = value;
      record.balance = record.gemm_share = record.moe_seconds = record.moe_gflops = value;
      record.learning_rate = static_cast<float>(std::clamp(value, -1e38, 1e38));
    }
    checked(report_html(run));
  }
}

TEST(Report, OfARunThatDivergesSlowly) {
  auto run = synthetic_run();
  for (auto& record : run.history.steps)
    record.loss *= std::pow(10.0, 0.7 * static_cast<double>(record.step));
  checked(report_html(run));
}

TEST(Report, OfManySteps) {
  const auto html = report_html(synthetic_run({.steps = 100'000, .load_every = 50}));
  const auto markup = checked(html);
  EXPECT_LE(html.size(), 300'000U);
  for (const auto& element : markup.elements) {
    const auto points = element.attributes.find("data-x");
    if (points == element.attributes.end()) continue;
    EXPECT_LT(std::count(points->second.begin(), points->second.end(), ' '), 1000);
  }
}

TEST(Report, OfManyLayersAndExperts) {
  const auto html = report_html(
      synthetic_run({.steps = 100'000, .load_every = 1000, .layers = 64, .experts = 256}));
  const auto markup = checked(html);
  EXPECT_EQ(markup.count("img"), 64U);
  EXPECT_LE(html.size(), 500'000U);
  EXPECT_TRUE(contains(markup.text, "the most uneven of up to 4 neighbours"));
}

}  // namespace
}  // namespace switchyard::train::report_test
