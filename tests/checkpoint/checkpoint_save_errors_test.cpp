// SPDX-License-Identifier: Apache-2.0
// If one rank cannot save, no rank does, and the old checkpoint stays.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <fstream>

#include "support/checkpoint/safetensors_files.h"
#include "support/child.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/shared_folder.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard::testing::checkpoint_save_errors_test {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

CheckpointContents one_value(float value) {
  return {.tensors = {{"w", Tensor::from<float>({1}, {value})}}};
}

std::string name_of(CheckpointForm form) {
  return form == CheckpointForm::one_file ? "file" : "folder";
}

class CheckpointSaveErrorsTest : public ::testing::TestWithParam<RankCase> {
 protected:
  // In both forms, over an old checkpoint in a folder that all ranks share.
  void over_an_old_one(
      const std::function<void(Communicator&, const fs::path&, CheckpointForm)>& body) {
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto folder = folder_.path(comm);
      for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
        const auto path = folder / name_of(form);
        save_checkpoint(comm, path, one_value(1.0F), form);
        const auto before = Folder::names_in(folder);
        body(comm, path, form);
        comm.barrier();
        EXPECT_EQ(Folder::names_in(folder), before);
        EXPECT_EQ(Checkpoint::open(path).tensor("w").span<float>()[0], 1.0F);
        comm.barrier();
      }
    });
  }

  SharedFolder folder_;
};

// The same on every rank, with the path as PATH.
template <typename Error>
std::string save_error(Communicator& comm, const fs::path& path, const CheckpointContents& contents,
                       CheckpointForm form) {
  const auto error = error_of<Error>([&] { save_checkpoint(comm, path, contents, form); });
  for (const auto& other : gather_strings(comm, error)) EXPECT_EQ(other, error);
  return replace_all(error, path.string(), "PATH");
}

TEST_P(CheckpointSaveErrorsTest, ABadTensorNameOnOneRankReachesAllRanks) {
  over_an_old_one([](Communicator& comm, const fs::path& path, CheckpointForm form) {
    auto contents = one_value(2.0F);
    const auto last = comm.size() - 1;
    if (comm.rank() == last) contents.tensors["__metadata__"] = contents.tensors["w"];
    EXPECT_EQ(save_error<InvalidArgument>(comm, path, contents, form),
              "save_checkpoint: rank " + std::to_string(last) +
                  ": a tensor must not be named __metadata__");
  });
}

TEST_P(CheckpointSaveErrorsTest, AGpusMemoryIsNotRead) {
  const std::string rest = testing::kGivenToTheCpu;
  over_an_old_one([&](Communicator& comm, const fs::path& path, CheckpointForm form) {
    const auto last = comm.size() - 1;
    const auto at_last = "save_checkpoint: rank " + std::to_string(last) + ": ";
    auto contents = one_value(2.0F);
    if (comm.rank() == last) contents.tensors["w"] = elsewhere(contents.tensors["w"]);
    EXPECT_EQ(save_error<InvalidArgument>(comm, path, contents, form),
              at_last + "tensor 'w' [1]" + rest);
    const auto alone = ExpertPlacement::contiguous(6, 1);
    const MoeParameters layer(tiny_layer_options(), alone, 0);
    auto tensors = layer.weights();
    if (comm.rank() == last) tensors.experts[2].up = elsewhere(tensors.experts[2].up);
    EXPECT_EQ(
        save_error<InvalidArgument>(comm, path, {.blocks = {{"mlp.", tensors, alone, 0}}}, form),
        at_last + "mlp.experts.2.up_proj.weight [4,6]" + rest);
    tensors = layer.weights();
    if (comm.rank() == last) tensors.router.gate = elsewhere(tensors.router.gate);
    EXPECT_EQ(
        save_error<InvalidArgument>(comm, path, {.blocks = {{"mlp.", tensors, alone, 0}}}, form),
        at_last + "mlp.gate.weight [6,6]" + rest);
  });
}

TEST_P(CheckpointSaveErrorsTest, NamesWhatRanksDisagreeAbout) {
  over_an_old_one([](Communicator& comm, const fs::path& path, CheckpointForm form) {
    if (comm.size() == 1) return;
    const CheckpointContents contents{
        .tensors = {{"v", Tensor::zeros({comm.rank() < 1 ? 2 : 3}, Dtype::f32)}}};
    EXPECT_EQ(save_error<InvalidArgument>(comm, path, contents, form),
              "save_checkpoint: tensor 'v' is f32 [2] on rank 0, but f32 [3] on rank 1");
  });
}

// Memory that cannot be read stands for whatever goes wrong on one rank in the middle.
TEST_P(CheckpointSaveErrorsTest, AFailedWriteOnOneRankReachesAllRanks) {
  constexpr std::size_t kBytes = 4096;
  void* unreadable = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(unreadable, MAP_FAILED);
  over_an_old_one([&](Communicator& comm, const fs::path& path, CheckpointForm form) {
    const int last = comm.size() - 1;
    auto contents = one_value(2.0F);
    if (comm.rank() == last) {
      contents.tensors["v"] = ConstTensorView(static_cast<const float*>(unreadable), {kBytes / 4});
    }
    const auto error = save_error<StorageError>(comm, path, contents, form);
    EXPECT_TRUE(error.starts_with("save_checkpoint: rank " + std::to_string(last) +
                                  ": cannot write 4096 bytes at "))
        << error;
    EXPECT_TRUE(error.ends_with(": Bad address")) << error;
  });
  ::munmap(unreadable, kBytes);
}

TEST_P(CheckpointSaveErrorsTest, AMissingParentFolderIsNamed) {
  over_an_old_one([](Communicator& comm, const fs::path& path, CheckpointForm form) {
    EXPECT_EQ(save_error<StorageError>(comm, path.parent_path() / "none/x", one_value(2), form),
              "save_checkpoint: rank 0: cannot create PATH: No such file or directory");
  });
}

TEST_P(CheckpointSaveErrorsTest, FilesAndFoldersDoNotReplaceEachOther) {
  over_an_old_one([](Communicator& comm, const fs::path& path, CheckpointForm form) {
    const bool is_file = form == CheckpointForm::one_file;
    EXPECT_EQ(save_error<InvalidArgument>(
                  comm, path, one_value(2.0F),
                  is_file ? CheckpointForm::file_per_rank : CheckpointForm::one_file),
              is_file ? "save_checkpoint: rank 0: PATH is not a folder, but the checkpoint is to "
                        "be a folder with one file per rank"
                      : "save_checkpoint: rank 0: PATH is a folder, but the checkpoint is to be "
                        "one file");
  });
}

// A folder is replaced whole: it must not be somebody's home.
TEST_P(CheckpointSaveErrorsTest, AFolderWithOtherContentsIsNotReplaced) {
  on_ranks(GetParam(), [&](Communicator& comm) {
    const auto path = folder_.path(comm);
    if (comm.rank() == 0) std::ofstream(path / "letter.txt") << "dear";
    comm.barrier();
    EXPECT_EQ(save_error<StorageError>(comm, path, one_value(2), CheckpointForm::file_per_rank),
              "save_checkpoint: rank 0: PATH holds 'letter.txt', which is not part of a checkpoint "
              "and would be lost; choose another folder");
    EXPECT_EQ(Folder::names_in(path), Names{"letter.txt"});
  });
}

TEST_P(CheckpointSaveErrorsTest, AFullDiskIsNamed) {
  struct statfs status = {};
  constexpr auto kTmpfs = 0x01021994;
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != kTmpfs) {
    GTEST_SKIP() << "/dev/shm is no tmpfs, which would refuse too much at once";
  }
  on_ranks(GetParam(), [&](Communicator& comm) {
    // Never read: there is no room for it.
    const float value = 0.0F;
    const CheckpointContents huge{
        .tensors = {{"w", ConstTensorView(&value, {std::int64_t{1} << 48})}}};
    const auto path = "/dev/shm" / folder_.path(comm).filename();
    EXPECT_EQ(save_error<StorageError>(comm, path, huge, CheckpointForm::one_file),
              "save_checkpoint: rank 0: cannot reserve 1125899906842752 bytes for PATH: No space "
              "left on device");
    EXPECT_EQ(save_error<StorageError>(comm, path, huge, CheckpointForm::file_per_rank),
              "save_checkpoint: rank 0: cannot reserve 1125899906842752 bytes for "
              "PATH/model-00001-of-00001.safetensors: No space left on device");
    comm.barrier();
    for (const auto& name : Folder::names_in("/dev/shm")) {
      EXPECT_EQ(name.find(path.filename().string()), std::string::npos) << name;
    }
  });
}

// Root may write anywhere, so a child becomes somebody else.
TEST(CheckpointSaveErrors, AReadOnlyFolderIsNamed) {
  const Folder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec |
                                     fs::perms::others_read | fs::perms::others_exec);
  for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
    const auto error = in_child([&] {
      constexpr uid_t kNobody = 65534;
      if (::geteuid() == 0 && ::setuid(kNobody) != 0) return std::string("still root");
      const auto alone = connect();
      return error_of<StorageError>(
          [&] { save_checkpoint(*alone, folder / "x", one_value(2.0F), form); });
    });
    EXPECT_EQ(replace_all(error, (folder / "x").string(), "PATH"),
              "save_checkpoint: rank 0: cannot create PATH: Permission denied");
  }
  EXPECT_TRUE(folder.names().empty());
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointSaveErrorsTest, ::testing::ValuesIn(rank_cases()),
                         rank_case_name);

}  // namespace
}  // namespace switchyard::testing::checkpoint_save_errors_test
