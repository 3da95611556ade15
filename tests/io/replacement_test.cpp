// SPDX-License-Identifier: Apache-2.0
#include "io/replacement.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include "support/checkpoint/safetensors_files.h"
#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard::replacement_test {
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

bool anything(const fs::directory_entry& /*entry*/) { return true; }
bool only_old_ones(const fs::directory_entry& entry) { return entry.path().filename() == "old"; }

// A folder "x" that holds these, and what shall replace it.
void put_folders(const Folder& folder, const Replacement& replacement, const Names& names) {
  fs::create_directory(folder / "x");
  for (const auto& name : names) put(folder / "x" / name, "");
  fs::create_directory(replacement.temporary());
  put(replacement.temporary() / "new", "");
}

TEST(Replacement, TakesThePlaceOfAFileOrOfNothing) {
  const Folder folder;
  for (const std::string text : {"first", "second"}) {
    Replacement replacement(folder / "x", random_token(), anything);
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
      Replacement replacement(folder / "x", random_token(), anything);
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
    const Replacement replacement(folder / "x", random_token(), anything);
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
  Replacement replacement(folder / "x", random_token(), anything);
  EXPECT_EQ(error_of<StorageError>([&] { replacement.commit(); }),
            "cannot replace " + (folder / "x").string() + ": No such file or directory");
  put(replacement.temporary(), "a file");
  EXPECT_EQ(error_of<StorageError>([&] { replacement.commit(); }),
            "cannot replace " + (folder / "x").string() + ": Is a directory");
  EXPECT_EQ(get(folder / "x/y"), "old");
}

TEST(Replacement, LeavesAFolderThatHoldsSomethingElse) {
  const Folder folder;
  {
    Replacement replacement(folder / "x", random_token(), only_old_ones);
    put_folders(folder, replacement, {"letter", "old"});
    EXPECT_EQ(error_of<StorageError>([&] { replacement.commit(); }),
              (folder / "x").string() + " holds 'letter', which is not part of a checkpoint and " +
                  "would be lost; choose another folder");
  }
  EXPECT_EQ(Folder::names_in(folder / "x"), (Names{"letter", "old"}));
  EXPECT_EQ(folder.names(), Names{"x"});
}

// The callback, which is asked before, after and when removing, puts it there.
TEST(Replacement, PutsBackAFolderThatGotSomethingElse) {
  const Folder folder;
  {
    int asked = 0;
    Replacement replacement(folder / "x", random_token(), [&](const fs::directory_entry& entry) {
      if (asked++ == 0) put(folder / "x/letter", "");
      return asked == 1 || only_old_ones(entry);
    });
    put_folders(folder, replacement, {"old"});
    EXPECT_NE(error_of<StorageError>([&] { replacement.commit(); }), "no error");
  }
  EXPECT_EQ(Folder::names_in(folder / "x"), (Names{"letter", "old"}));
  EXPECT_EQ(folder.names(), Names{"x"});
}

TEST(Replacement, KeepsAsideWhatItMustNotRemove) {
  const Folder folder;
  {
    bool is_replaced = false;
    Replacement replacement(folder / "x", "7", [&](const fs::directory_entry& entry) {
      if (entry.path().parent_path() == folder / "x") return true;
      return !std::exchange(is_replaced, true);
    });
    put_folders(folder, replacement, {"letter"});
    replacement.commit();
  }
  EXPECT_EQ(Folder::names_in(folder / "x"), Names{"new"});
  EXPECT_EQ(folder.names(), (Names{".x.old-7", "x"}));
  EXPECT_EQ(Folder::names_in(folder / ".x.old-7"), Names{"letter"});
}

// A folder that may be written to but not opened cannot be synced. Root may open any, so a child
// becomes somebody else.
std::string commit_where_syncing_fails(const Folder& folder, Replacement& replacement) {
  constexpr uid_t kNobody = 65534;
  fs::permissions(folder.path(), fs::perms{0333});
  const auto error = testing::in_child([&] {
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) return std::string("still root");
    return error_of<StorageError>([&] { replacement.commit(); });
  });
  fs::permissions(folder.path(), fs::perms::owner_all);
  return testing::replace_all(error, folder.path().string(), "FOLDER");
}

TEST(Replacement, AFailedSyncLeavesWhatWasThere) {
  const Folder folder;
  const std::string expected = "cannot open the folder FOLDER: Permission denied";
  {
    Replacement replacement(folder / "x", random_token(), anything);
    put(replacement.temporary(), "new");
    EXPECT_EQ(commit_where_syncing_fails(folder, replacement), expected);
    EXPECT_FALSE(fs::exists(folder / "x"));
    put(folder / "x", "old");
    EXPECT_EQ(commit_where_syncing_fails(folder, replacement), expected);
    EXPECT_EQ(get(folder / "x"), "old");
  }
  fs::remove(folder / "x");
  {
    Replacement replacement(folder / "x", random_token(), anything);
    put_folders(folder, replacement, {"old"});
    fs::permissions(replacement.temporary(), fs::perms::all);
    fs::permissions(folder / "x", fs::perms::all);
    EXPECT_EQ(commit_where_syncing_fails(folder, replacement), expected);
    EXPECT_EQ(Folder::names_in(folder / "x"), Names{"old"});
  }
  EXPECT_EQ(folder.names(), Names{"x"});
}

// For file systems that cannot exchange two names.
TEST(Replacement, ReplacesAFolderInTwoSteps) {
  const Folder folder;
  for (const std::string name : {"old", "new"}) {
    fs::create_directory(folder / name);
    put(folder / name / name, "");
  }
  const auto replace = [&](const std::string& temporary, const std::string& path) {
    replace_in_two_steps(folder / temporary, folder / path, folder / "aside");
  };
  replace("new", "old");
  EXPECT_EQ(Folder::names_in(folder / "old"), Names{"new"});
  EXPECT_EQ(Folder::names_in(folder / "aside"), Names{"old"});
  fs::rename(folder / "aside", folder / "new");
  EXPECT_EQ(error_of<StorageError>([&] { replace("none", "old"); }),
            "cannot replace " + (folder / "old").string() + ": No such file or directory");
  EXPECT_EQ(Folder::names_in(folder / "old"), Names{"new"});
  EXPECT_EQ(error_of<StorageError>([&] { replace("new", "none"); }),
            "cannot move aside " + (folder / "none").string() + ": No such file or directory");
  EXPECT_EQ(folder.names(), (Names{"new", "old"}));
}

TEST(Replacement, ReplacesAFileInTwoSteps) {
  const Folder folder;
  put(folder / "old", "old");
  put(folder / "new", "new");
  const auto replace = [&](const std::string& temporary) {
    replace_in_two_steps(folder / temporary, folder / "old", folder / "aside");
  };
  EXPECT_NE(error_of<StorageError>([&] { replace("none"); }), "no error");
  EXPECT_EQ(folder.names(), (Names{"new", "old"}));
  replace("new");
  EXPECT_EQ(get(folder / "old"), "new");
  EXPECT_EQ(get(folder / "aside"), "old");
}

TEST(Replacement, TemporaryNamesAreHiddenBesideAndNotTooLong) {
  EXPECT_EQ(temporary_beside("/a/b.safetensors", "7"), "/a/.b.safetensors.tmp-7");
  EXPECT_EQ(temporary_beside("b", "7"), ".b.tmp-7");
  EXPECT_EQ(aside_of("/a/b.safetensors", "7"), "/a/.b.safetensors.old-7");
  const Folder folder;
  const std::string longest(255, 'x');
  Replacement replacement(folder / longest, random_token(), anything);
  put(replacement.temporary(), "");
  replacement.commit();
  EXPECT_EQ(folder.names(), Names{longest});
  EXPECT_NE(random_token(), random_token());
}

}  // namespace
}  // namespace switchyard::replacement_test
