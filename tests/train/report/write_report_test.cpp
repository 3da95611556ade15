// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <future>
#include <iterator>

#include "report/report.h"
#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"
#include "train/report/synthetic_run.h"

namespace switchyard::train::write_report_test {
namespace {

using testing::error_of;
using testing::Folder;
using testing::in_child;
using testing::synthetic_run;
using Names = std::set<std::string>;

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string writing(const std::filesystem::path& path) {
  return error_of<StorageError>([&] { write_report(path, synthetic_run({.steps = 20})); });
}

TEST(WriteReport, WritesAndReplaces) {
  const Folder folder;
  const auto path = folder / "report.html";
  write_report(path, {});
  EXPECT_EQ(contents_of(path), report_html({}));
  const auto run = synthetic_run({.steps = 20});
  write_report(path, run);
  EXPECT_EQ(contents_of(path), report_html(run));
  EXPECT_EQ(folder.names(), Names{"report.html"});
}

TEST(WriteReport, ANameWithoutAFolderIsInThisOne) {
  const Folder folder;
  const auto error = in_child([&] {
    if (::chdir(folder.path().c_str()) != 0) return std::string("no folder");
    return writing("report.html");
  });
  EXPECT_EQ(error, "no error");
  EXPECT_EQ(folder.names(), Names{"report.html"});
}

TEST(WriteReport, AFolderThatIsMissing) {
  const Folder folder;
  const auto path = folder / "none" / "report.html";
  EXPECT_EQ(writing(path),
            "cannot write the report " + path.string() + ": No such file or directory");
}

TEST(WriteReport, AFolderInItsPlace) {
  const Folder folder;
  std::filesystem::create_directory(folder / "report.html");
  EXPECT_EQ(writing(folder / "report.html"),
            "cannot write the report " + (folder / "report.html").string() + ": Is a directory");
  EXPECT_EQ(folder.names(), Names{"report.html"});
}

TEST(WriteReport, AFolderThatMayNotBeWrittenTo) {
  const Folder folder;
  ::chmod(folder.path().c_str(), 0555);
  const auto error = in_child([&] {
    constexpr uid_t kNobody = 65534;  // root may write anywhere
    if (::getuid() == 0 && ::setuid(kNobody) != 0) return std::string("cannot become nobody");
    return writing(folder / "report.html");
  });
  ::chmod(folder.path().c_str(), 0755);
  EXPECT_EQ(error,
            "cannot write the report " + (folder / "report.html").string() + ": Permission denied");
}

TEST(WriteReport, AFullDiskLeavesTheReportThatWasThere) {
  const Folder folder;
  const auto path = folder / "report.html";
  std::ofstream(path) << "the one before";
  const auto error = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{5000, 5000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return writing(path);
  });
  EXPECT_EQ(error, "cannot write the report " + path.string() + ": File too large");
  EXPECT_EQ(contents_of(path), "the one before");
  EXPECT_EQ(folder.names(), Names{"report.html"});
}

TEST(WriteReport, FollowsLinks) {
  const Folder folder;
  std::filesystem::create_directory(folder / "elsewhere");
  std::filesystem::create_symlink("elsewhere/report.html", folder / "near.html");
  std::filesystem::create_symlink(folder / "near.html", folder / "far.html");
  for (const char* when : {"new", "replaced"}) {
    write_report(folder / "far.html", {});
    EXPECT_TRUE(std::filesystem::is_symlink(folder / "far.html")) << when;
    EXPECT_TRUE(std::filesystem::is_symlink(folder / "near.html")) << when;
    EXPECT_EQ(Folder::names_in(folder / "elsewhere"), Names{"report.html"}) << when;
    EXPECT_EQ(contents_of(folder / "elsewhere" / "report.html"), report_html({})) << when;
  }
}

TEST(WriteReport, LinksInACircle) {
  const Folder folder;
  std::filesystem::create_symlink("a", folder / "b");
  std::filesystem::create_symlink("b", folder / "a");
  EXPECT_EQ(writing(folder / "a"), "cannot write the report " + (folder / "a").string() +
                                       ": Too many levels of symbolic links");
  EXPECT_EQ(folder.names(), (Names{"a", "b"}));
}

// Through a link: a mistake would then replace that, and not the machine's own device.
TEST(WriteReport, ADeviceFileIsWrittenToAndNotReplaced) {
  const Folder folder;
  std::filesystem::create_symlink("/dev/null", folder / "nothing");
  EXPECT_EQ(writing(folder / "nothing"), "no error");
  EXPECT_EQ(std::filesystem::read_symlink(folder / "nothing"), "/dev/null");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  std::filesystem::create_symlink("/dev/full", folder / "full");
  EXPECT_EQ(writing(folder / "full"),
            "cannot write the report " + (folder / "full").string() + ": No space left on device");
}

TEST(WriteReport, APipeIsWrittenTo) {
  const Folder folder;
  const auto path = folder / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(writing(path),
            "cannot write the report " + path.string() + ": No such device or address");
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ::fcntl(reader, F_SETFL, 0);
  auto written = std::async(std::launch::async, [&] { return writing(path); });
  std::string text;
  std::array<char, 1 << 16> buffer{};
  for (;;) {
    const bool has_ended =
        written.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
    const auto n = ::read(reader, buffer.data(), buffer.size());
    if (n > 0) text.append(buffer.data(), static_cast<std::size_t>(n));
    if (n <= 0 && has_ended) break;
  }
  ::close(reader);
  EXPECT_EQ(written.get(), "no error");
  EXPECT_EQ(text, report_html(synthetic_run({.steps = 20})));
  EXPECT_TRUE(std::filesystem::is_fifo(path));
}

TEST(WriteReport, TheFileBehindStandardOutputIsNotReplaced) {
  const Folder folder;
  const auto log = folder / "log";
  const auto error = in_child([&] {
    if (std::freopen(log.c_str(), "w", stdout) == nullptr) return std::string("no log");
    std::puts("step 1");
    std::fflush(stdout);
    auto outcome = writing("/dev/stdout");
    std::puts("step 2");
    std::fflush(stdout);
    return outcome;
  });
  EXPECT_EQ(error, "no error");
  EXPECT_EQ(contents_of(log), "step 1\n" + report_html(synthetic_run({.steps = 20})) + "step 2\n");
}

}  // namespace
}  // namespace switchyard::train::write_report_test
