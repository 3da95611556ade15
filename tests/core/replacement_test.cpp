#include "core/replacement.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>

#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::Folder;
using Names = std::set<std::string>;

void put(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

std::string get(const fs::path& path) {
  std::ifstream stream(path);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(Replacement, TakesThePlaceOfAFileOrOfNothing) {
  const Folder folder;
  for (const std::string text : {"first", "second"}) {
    Replacement replacement(folder / "x", random_token());
    put(replacement.temporary(), text);
    replacement.commit();
    EXPECT_EQ(get(folder / "x"), text);
  }
  EXPECT_EQ(folder.names(), Names{"x"});
}

TEST(Replacement, TakesThePlaceOfAFolder) {
  const Folder folder;
  fs::create_directory(folder / "x");
  for (const std::string text : {"first", "second"}) {
    {
      Replacement replacement(folder / "x", random_token());
      fs::create_directory(replacement.temporary());
      put(replacement.temporary() / text, text);
      replacement.commit();
    }
    EXPECT_EQ(Folder::names_in(folder / "x"), Names{text});
    EXPECT_EQ(folder.names(), Names{"x"});
  }
}

TEST(Replacement, LeavesNothingBehindWhenGivenUp) {
  const Folder folder;
  put(folder / "x", "old");
  {
    const Replacement replacement(folder / "x", random_token());
    fs::create_directory(replacement.temporary());
    put(replacement.temporary() / "y", "new");
    EXPECT_EQ(folder.names().size(), 2U);
  }
  EXPECT_EQ(folder.names(), Names{"x"});
  EXPECT_EQ(get(folder / "x"), "old");
}

TEST(Replacement, SaysWhatItCouldNotReplace) {
  const Folder folder;
  fs::create_directory(folder / "x");
  put(folder / "x/y", "old");
  Replacement replacement(folder / "x", random_token());
  EXPECT_EQ(error_of<StorageError>([&] { replacement.commit(); }),
            "cannot replace " + (folder / "x").string() + ": No such file or directory");
  put(replacement.temporary(), "a file");
  EXPECT_EQ(error_of<StorageError>([&] { replacement.commit(); }),
            "cannot replace " + (folder / "x").string() + ": Is a directory");
  EXPECT_EQ(get(folder / "x/y"), "old");
}

// For file systems that cannot exchange two names.
TEST(Replacement, InTwoSteps) {
  const Folder folder;
  for (const std::string name : {"old", "new"}) {
    fs::create_directory(folder / name);
    put(folder / name / name, "");
  }
  replace_in_two_steps(folder / "new", folder / "old");
  EXPECT_EQ(Folder::names_in(folder / "old"), Names{"new"});
  EXPECT_EQ(Folder::names_in(folder / "new"), Names{"old"});
  EXPECT_EQ(error_of<StorageError>([&] { replace_in_two_steps(folder / "none", folder / "old"); }),
            "cannot replace " + (folder / "old").string() + ": No such file or directory");
  EXPECT_EQ(Folder::names_in(folder / "old"), Names{"new"});
  EXPECT_EQ(error_of<StorageError>([&] { replace_in_two_steps(folder / "new", folder / "none"); }),
            "cannot move aside " + (folder / "none").string() + ": No such file or directory");
  EXPECT_EQ(folder.names(), (Names{"new", "old"}));
}

TEST(Replacement, TemporaryNamesAreHiddenBesideAndNotTooLong) {
  EXPECT_EQ(temporary_beside("/a/b.safetensors", "7"), "/a/.b.safetensors.tmp-7");
  EXPECT_EQ(temporary_beside("b", "7"), ".b.tmp-7");
  const Folder folder;
  const std::string longest(255, 'x');
  Replacement replacement(folder / longest, random_token());
  put(replacement.temporary(), "");
  replacement.commit();
  EXPECT_EQ(folder.names(), Names{longest});
  EXPECT_NE(random_token(), random_token());
}

}  // namespace
}  // namespace switchyard
