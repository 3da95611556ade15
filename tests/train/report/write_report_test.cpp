#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
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

}  // namespace
}  // namespace switchyard::train::write_report_test
