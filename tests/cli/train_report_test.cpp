// SPDX-License-Identifier: Apache-2.0
// The report of a run names its origin and its end.
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <string>

#include "cli/train_runs.h"
#include "switchyard/build_info.h"

namespace switchyard::testing::train_report_test {
namespace {

class TrainOrigin : public TrainRuns {
 protected:
  std::string report() const { return (folder_ / "report's.html").string(); }
  // As a shell takes it.
  std::string to_report() const { return " --report \"" + report() + "\""; }
  std::string contents() const {
    std::ifstream file(report());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The value beside a name of the section that says where the report comes from; "none": no line.
  static std::string value(const std::string& html, const std::string& name) {
    const auto begin = "<dt>" + name + "</dt><dd>";
    const auto at = html.find(begin);
    if (at == std::string::npos) return "none";
    const auto first = at + begin.size();
    return html.substr(first, html.find("</dd>", first) - first);
  }
};

std::string today() {
  const auto now = std::time(nullptr);
  std::string text(10, ' ');
  std::strftime(text.data(), text.size() + 1, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

TEST_F(TrainOrigin, SaysWhereItComesFrom) {
  const auto day_before = today();
  const auto outcome = train("--ranks 2 --steps 3" + to_report());
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const auto html = contents();
  const auto started = value(html, "Started").substr(0, 10);
  EXPECT_TRUE(started == day_before || started == today()) << started;
  EXPECT_NE(html.find("<p>Completed on 20"), std::string::npos);
  const auto program = value(html, "Program");
  EXPECT_TRUE(program.starts_with("Switchyard " + std::string(version()) + ", commit ")) << program;
  const auto command = value(html, "Command");
  EXPECT_TRUE(command.ends_with(" --ranks 2 --steps 3 --report &#39;" + folder_.path().string() +
                                "/report&#39;\\&#39;&#39;s.html&#39;"))
      << command;
  EXPECT_TRUE(command.starts_with(SWITCHYARD_COMMAND " train --layers 2 ")) << command;
  EXPECT_TRUE(value(html, "Text").starts_with((folder_ / "text.txt").string() + ": "));
  EXPECT_TRUE(value(html, "Peak memory").ends_with(" MB")) << value(html, "Peak memory");
  EXPECT_NE(value(html, "Host"), "none");
  EXPECT_NE(value(html, "CPU"), "none");
  EXPECT_EQ(value(html, "Stopped"), "none");
  EXPECT_EQ(value(html, "Resumed"), "none");
  EXPECT_NE(html.find("<th>rank 1</th>"), std::string::npos);
}

TEST_F(TrainOrigin, SaysWhereTheRunWasStoppedAndResumed) {
  {
    Background command(
        arguments("--ranks 2 --steps 100000 --evaluate-every 0 --every 50000 "
                  "--json --save " +
                  saved() + to_report()));
    command.line();
    command.signal(SIGTERM);
    EXPECT_EQ(command.exit_code(), 3);
  }
  const auto stopped = contents();
  const auto where = value(stopped, "Stopped");
  ASSERT_TRUE(where.starts_with("after step ")) << where;
  const auto step = where.substr(0, where.find(" ("));
  EXPECT_NE(stopped.find("<p class=\"bad\">Stopped by a signal " + step + " of 100,000.</p>"),
            std::string::npos);
  EXPECT_EQ(value(stopped, "Resumed"), "none");
  // Twice: the first resume is in the checkpoint that the second begins with.
  const auto last = std::to_string(std::stoll(step.substr(11)) + 2);
  const auto more = std::to_string(std::stoll(step.substr(11)) + 4);
  const auto resumed = "--ranks 2 --save " + saved() + " --resume " + saved() + to_report();
  EXPECT_EQ(train(resumed + " --steps " + last).status, 0);
  EXPECT_EQ(train(resumed + " --steps " + more).status, 0);
  const auto html = contents();
  const auto resumes = value(html, "Resumed");
  EXPECT_TRUE(resumes.starts_with(step + " (20")) << resumes;
  EXPECT_NE(resumes.find("UTC), after step " + last + " (20"), std::string::npos) << resumes;
  EXPECT_EQ(value(html, "Stopped"), "none");
  EXPECT_NE(html.find("<p>Completed on 20"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::testing::train_report_test
