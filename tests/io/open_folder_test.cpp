// SPDX-License-Identifier: Apache-2.0
#include "io/open_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard::open_folder_test {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using Names = std::vector<std::string>;

char first_of(const MappedFile& mapping) { return static_cast<char>(*mapping.data); }

TEST(OpenFolder, IsTheSameWhateverTakesItsPlace) {
  const testing::Folder folder;
  for (const std::string name : {"old", "new"}) {
    fs::create_directory(folder / name);
    std::ofstream(folder / name / "x") << name;
  }
  std::ofstream(folder / "old" / "a");
  const OpenFolder opened(folder / "old");
  EXPECT_FALSE(opened.is_replaced());
  fs::rename(folder / "old", folder / "aside");
  EXPECT_TRUE(opened.is_replaced());
  fs::rename(folder / "new", folder / "old");
  EXPECT_TRUE(opened.is_replaced());
  EXPECT_EQ(opened.names(), (Names{"a", "x"}));
  EXPECT_EQ(first_of(opened.map("x")), 'o');
  fs::remove(folder / "aside" / "x");
  EXPECT_FALSE(opened.has("x"));
  EXPECT_TRUE(opened.has("a"));
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)opened.map("x"); }),
            "cannot open " + (folder / "old" / "x").string() + ": No such file or directory");
}

TEST(OpenFolder, SaysWhyItCannotBeOpened) {
  const testing::Folder folder;
  std::ofstream(folder / "file");
  EXPECT_EQ(error_of<InvalidArgument>([&] { OpenFolder(folder / "none"); }),
            "cannot open the folder " + (folder / "none").string() + ": No such file or directory");
  EXPECT_EQ(error_of<InvalidArgument>([&] { OpenFolder(folder / "file"); }),
            "cannot open the folder " + (folder / "file").string() + ": Not a directory");
}

// Root may list anything, so a child becomes somebody else.
TEST(OpenFolder, FilesCanBeReadWhereTheyCannotBeListed) {
  const testing::Folder folder;
  std::ofstream(folder / "x") << "o";
  fs::permissions(folder.path(), fs::perms{0111});
  const auto error = testing::in_child([&] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) return std::string("still root");
    const OpenFolder opened(folder.path());
    if (first_of(opened.map("x")) != 'o') return std::string("not read");
    return error_of<InvalidArgument>([&] { (void)opened.names(); });
  });
  fs::permissions(folder.path(), fs::perms::owner_all);
  EXPECT_EQ(error, "cannot list the folder " + folder.path().string() + ": Permission denied");
}

}  // namespace
}  // namespace switchyard::open_folder_test
