// SPDX-License-Identifier: Apache-2.0
// Files and folders that saving a checkpoint replaces, and those it leaves alone.
#include "checkpoint/checkpoint_target.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "support/checkpoint/safetensors_files.h"
#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard::testing::checkpoint_target_test {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

class CheckpointTarget : public ::testing::Test {
 protected:
  void save(const fs::path& path, CheckpointForm form, const NamedTensors& tensors = {}) const {
    save_checkpoint(*alone_, path, {.tensors = tensors}, form);
  }
  // With the path as PATH.
  template <typename Error = InvalidArgument>
  std::string save_error(const fs::path& path, CheckpointForm form,
                         const NamedTensors& tensors = {}) const {
    return replace_all(error_of<Error>([&] { save(path, form, tensors); }), path.string(), "PATH");
  }

  const Folder folder_;
  const std::unique_ptr<Communicator> alone_ = connect();
};

TEST_F(CheckpointTarget, OnlyARegularFileIsReplaced) {
  const auto pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(save_error(pipe, CheckpointForm::one_file),
            "save_checkpoint: rank 0: PATH is not a regular file, but the checkpoint is to be one "
            "file");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(
      error_of<InvalidArgument>([] { require_replaceable("/dev/null", CheckpointForm::one_file); }),
      "/dev/null is not a regular file, but the checkpoint is to be one file");
}

TEST_F(CheckpointTarget, AFolderDoesNotReplaceALink) {
  save(folder_ / "folder", CheckpointForm::file_per_rank);
  fs::create_directory_symlink(folder_ / "folder", folder_ / "link");
  fs::create_symlink("none", folder_ / "dangling");
  for (const std::string name : {"link", "dangling"}) {
    EXPECT_EQ(save_error(folder_ / name, CheckpointForm::file_per_rank),
              "save_checkpoint: rank 0: PATH is a link, but the checkpoint is to be a folder with "
              "one file per rank");
  }
  EXPECT_EQ(folder_.names(), (Names{"dangling", "folder", "link"}));
}

// The file behind the link stays as it was.
TEST_F(CheckpointTarget, AFileReplacesALinkToOne) {
  std::ofstream(folder_ / "file") << "old";
  fs::create_symlink("file", folder_ / "link");
  save(folder_ / "link", CheckpointForm::one_file);
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder_ / "link")));
  EXPECT_EQ(fs::file_size(folder_ / "file"), 3U);
  EXPECT_EQ(folder_.names(), (Names{"file", "link"}));
}

TEST_F(CheckpointTarget, ANameThatIsTooLongIsRefusedFirst) {
  for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
    EXPECT_EQ(save_error(folder_ / std::string(256, 'x'), form),
              "save_checkpoint: rank 0: cannot save to PATH: File name too long");
    EXPECT_EQ(save_error(folder_ / (std::string(255, form == CheckpointForm::one_file ? 'x' : 'y')),
                         form),
              "no error");
  }
}

TEST_F(CheckpointTarget, AFileKeepsItsMode) {
  const auto path = folder_ / "x";
  save(path, CheckpointForm::one_file);
  for (const auto mode : {fs::perms::owner_read | fs::perms::owner_write, fs::perms{0640}}) {
    fs::permissions(path, mode);
    save(path, CheckpointForm::one_file);
    EXPECT_EQ(fs::status(path).permissions(), mode);
  }
}

// Root may list anything, so a child becomes somebody else.
TEST_F(CheckpointTarget, AFolderThatCannotBeListedIsNotReplaced) {
  const auto path = folder_ / "x";
  fs::create_directory(path);
  fs::permissions(folder_.path(), fs::perms::all);
  fs::permissions(path, fs::perms::none);
  const auto error = in_child([&] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) return std::string("still root");
    return save_error<StorageError>(path, CheckpointForm::file_per_rank);
  });
  fs::permissions(path, fs::perms::owner_all);
  EXPECT_EQ(error, "save_checkpoint: rank 0: cannot list the folder PATH: Permission denied");
}

// Before anything is written.
TEST_F(CheckpointTarget, AHeaderThatIsTooLongIsRefusedFirst) {
  const NamedTensors tensors{{std::string(100'000'000, 'x'), Tensor::zeros({1}, Dtype::f32)}};
  EXPECT_EQ(save_error(folder_ / "x", CheckpointForm::file_per_rank, tensors),
            "save_checkpoint: rank 0: the header of 1 tensors would have 100000120 bytes, but the "
            "limit is 100000000");
  EXPECT_TRUE(folder_.names().empty());
}

}  // namespace
}  // namespace switchyard::testing::checkpoint_target_test
