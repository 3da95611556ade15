// SPDX-License-Identifier: Apache-2.0
// Reports as a browser shows them: Chromium without a screen and without a network.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "report/report.h"
#include "support/folder.h"
#include "support/shell.h"
#include "train/report/synthetic_run.h"

namespace switchyard::train::rendering_test {
namespace {

using testing::Folder;
using testing::Outcome;
using testing::shell;
using testing::synthetic_run;

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string with_at_end(std::string html, const std::string& added) {
  return html.replace(html.rfind("</body>"), 0, added);
}

class ReportRendering : public ::testing::Test {
 protected:
  void SetUp() override {
    if (shell("command -v chromium").status != 0) GTEST_SKIP() << "there is no chromium";
  }

  std::filesystem::path written(const std::string& html) const {
    const auto path = folder_ / "report.html";
    std::ofstream(path) << html;
    return path;
  }
  // Renders the page, and returns the browser's output, including its console.
  Outcome pictured(const std::string& html, const std::string& picture,
                   const std::string& options) const {
    return shell(std::string("timeout 200 " SWITCHYARD_SCREENSHOT " ") + written(html).string() +
                 " " + (folder_ / picture).string() + " " + options + " 2>&1");
  }
  // The page's title once its scripts have run.
  std::string title_of(const std::string& html) const {
    const auto dom = shell(
        "timeout 200 chromium --headless=new --no-sandbox --disable-gpu "
        "--window-size=1200,900 --virtual-time-budget=5000 --user-data-dir=" +
        (folder_ / "profile").string() + " --dump-dom file://" + written(html).string() +
        " 2>/dev/null");
    EXPECT_EQ(dom.status, 0);
    const auto begin = dom.output.find("<title>") + 7;
    return dom.output.substr(begin, dom.output.find("</title>") - begin);
  }

  const Folder folder_;
};

bool complains(const Outcome& outcome) {
  return outcome.output.find("CONSOLE") != std::string::npos;
}

// A picture as large but of one colour has 18 kB.
TEST_F(ReportRendering, LightDarkAndNarrow) {
  const auto html = report_html(synthetic_run());
  std::vector<std::string> pictures;
  for (const char* options : {"light", "dark", "light 420"}) {
    const auto outcome = pictured(html, "picture.png", options);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_FALSE(complains(outcome)) << outcome.output;
    pictures.push_back(contents_of(folder_ / "picture.png"));
    EXPECT_EQ(pictures.back().substr(1, 3), "PNG");
    EXPECT_GT(pictures.back().size(), 100'000U);
  }
  EXPECT_NE(pictures[0], pictures[1]);
  EXPECT_EQ(pictures[0].substr(16, 8), pictures[1].substr(16, 8));  // as wide and as high
}

// That the test above would see it if the page complained, or asked for anything outside.
TEST_F(ReportRendering, ComplaintsAreSeen) {
  const auto html = report_html(synthetic_run({.steps = 20}));
  for (const char* added :
       {"<script>missing();</script>", "<img alt=\"\" src=\"http://localhost/x.png\">"}) {
    EXPECT_TRUE(complains(pictured(with_at_end(html, added), "picture.png", "light"))) << added;
  }
}

TEST_F(ReportRendering, AnEmptyReportShowsNoComplaints) {
  const auto outcome = pictured(report_html({}), "picture.png", "dark");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_FALSE(complains(outcome)) << outcome.output;
}

constexpr const char* kHover = R"(<script>
const said = [];
function hover(element, x, y) {
  const box = element.getBoundingClientRect();
  element.dispatchEvent(new PointerEvent('pointermove',
    { clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
  said.push(document.querySelector('.tip').textContent.replaceAll('\n', '; '));
}
const plots = document.querySelectorAll('.plot');
hover(plots[0], 0.5, 0.5);
hover(plots[1], 1, 0.5);
const cells = document.querySelector('.cells');
for (const y of [0.1, 0.9]) for (const x of [0.1, 0.9]) hover(cells, x, y);
document.title = said.join(' | ');
</script>)";

TEST_F(ReportRendering, ThePointerShowsValues) {
  auto run = synthetic_run({.steps = 5, .layers = 1});
  for (auto& record : run.history.steps) {
    record.loss = 6.0 - static_cast<double>(record.step);
    record.learning_rate = 0.25F;
  }
  run.history.held_out = {{2, 4.5}, {5, 1.5}};
  run.history.loads = {{.step = 3, .picks = {{30, 10}}}, {.step = 5, .picks = {{20, 20}}}};
  EXPECT_EQ(title_of(with_at_end(report_html(run), kHover)),
            "step 3; training  3; held-out  4.5 (step 2) | step 5; Learning rate  0.25 | "
            "layer 1, expert 0; steps 1–3; 1.49× of an even share | "
            "layer 1, expert 0; steps 4–5; 1.00× of an even share | "
            "layer 1, expert 1; steps 1–3; ≤ 0.50× of an even share | "
            "layer 1, expert 1; steps 4–5; 1.00× of an even share");
}

// Frames, since windows cannot be as narrow as phones.
TEST_F(ReportRendering, NothingIsWiderThanThePage) {
  auto run = synthetic_run({.layers = 24, .experts = 64});
  run.stages.push_back({std::string(60, 'x'), 3.0});
  run.configuration.emplace_back("save", std::string(300, 'y'));
  run.sample = std::string(500, 'z');
  run.title = std::string(200, 't');
  run.origin.command_line = run.origin.hosts = std::string(300, 'c');
  std::ofstream(folder_ / "framed.html") << with_at_end(report_html(run), R"(<script>
    const page = document.documentElement;
    parent.postMessage(page.scrollWidth - page.clientWidth, '*');
    </script>)");
  std::string frames = R"(<!DOCTYPE html><title></title><script>
    const beyond = [];
    onmessage = message => { beyond.push(message.data); document.title = beyond.join(' '); };
    </script>)";
  for (const char* width : {"320", "420", "700", "1000"}) {
    frames += std::string("<iframe src=\"framed.html\" width=\"") + width + "\"></iframe>";
  }
  EXPECT_EQ(title_of(frames), "0 0 0 0");
}

}  // namespace
}  // namespace switchyard::train::rendering_test
