// SPDX-License-Identifier: Apache-2.0
// Tests which files of a folder are checkpoints, which are removed, and which is offered.
#include "checkpoints/checkpoint_folder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "checkpoints/checkpoints.h"
#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/ranks.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::train::checkpoint_folder_test {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using Names = std::set<std::string>;

constexpr const char* kTen = "step-00000010.safetensors";
constexpr const char* kTwenty = "step-00000020.safetensors";
constexpr const char* kThirty = "step-00000030.safetensors";

class CheckpointFolder : public ::testing::Test {
 protected:
  fs::path put(const std::string& name, const std::string& text = "") const {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  // One that can be opened.
  fs::path put_good(const std::string& name) const {
    save_checkpoint(*connect(), folder_ / name, {});
    return folder_ / name;
  }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  std::string prepare(const fs::path& resumed) const {
    return error_of<InvalidArgument>([&] { prepare_folder(*connect(), folder_.path(), resumed); });
  }

  const testing::Folder folder_;
};

TEST_F(CheckpointFolder, ANameHoldsTheStep) {
  EXPECT_EQ(checkpoint_path("a", 100), fs::path("a/step-00000100.safetensors"));
  EXPECT_EQ(checkpoint_path("a", 1234567890), fs::path("a/step-1234567890.safetensors"));
}

TEST_F(CheckpointFolder, TheNewestComesFirstAndOtherFilesDoNotCount) {
  for (const auto* name : {kTen, "step-1234567890.safetensors", kTwenty, "step-0000010.safetensors",
                           "step--0000010.safetensors", "step-00000040.safetensors.bak",
                           "step-000000x0.safetensors", ".step-00000050.safetensors.tmp-1",
                           "model.safetensors", "step-99999999999999999999.safetensors"}) {
    put(name);
  }
  fs::create_directory(folder_ / "step-00000060.safetensors");
  EXPECT_EQ(list_checkpoints(folder_.path()),
            (std::vector<fs::path>{folder_ / "step-1234567890.safetensors", folder_ / kTwenty,
                                   folder_ / kTen}));
  EXPECT_TRUE(list_checkpoints(folder_ / "none").empty());
}

TEST_F(CheckpointFolder, AFolderThatCannotBeListedIsNamed) {
  put("file");
  EXPECT_EQ(error_of<InvalidArgument>([&] { list_checkpoints(folder_ / "file"); }),
            "cannot list the folder " + at("file") + ": Not a directory");
}

TEST_F(CheckpointFolder, OnlyOldCheckpointsAreRemoved) {
  for (const auto* name : {kTen, kTwenty, kThirty, "letter.txt"}) put(name);
  prune_checkpoints(folder_.path(), 30, 2);
  EXPECT_EQ(folder_.names(), (Names{kTwenty, kThirty, "letter.txt"}));
  prune_checkpoints(folder_.path(), 30, 0);
  EXPECT_EQ(folder_.names(), (Names{kThirty, "letter.txt"}));
}

// After going back to step 10: the run that wrote 20 and 30 was another.
TEST_F(CheckpointFolder, LaterCheckpointsAreSetAside) {
  for (const auto* name : {kTen, kTwenty, kThirty}) put(name);
  put("step-00000011.safetensors");
  prune_checkpoints(folder_.path(), 11, 1);
  EXPECT_EQ(folder_.names(),
            (Names{"step-00000011.safetensors", "step-00000020.safetensors.set-aside",
                   "step-00000030.safetensors.set-aside"}));
  EXPECT_EQ(list_checkpoints(folder_.path()),
            std::vector<fs::path>{folder_ / "step-00000011.safetensors"});
}

TEST_F(CheckpointFolder, ADamagedCheckpointOffersTheOneBeforeIt) {
  put_good(kTen);
  put_good(kTwenty);
  put_good("step-00000040.safetensors");
  const auto path = put(kThirty);
  EXPECT_EQ(words_for_damage(path, path.string() + ": it is bad"),
            path.string() + " is damaged: it is bad; use the one before it, " + at(kTwenty));
  put(kTwenty, "damaged as well");
  EXPECT_EQ(words_for_damage(path, path.string() + " has no end"),
            path.string() + " is damaged: has no end; use the one before it, " + at(kTen));
}

TEST_F(CheckpointFolder, ADamagedCheckpointOffersALaterOneOrNone) {
  const auto path = put(kTen);
  EXPECT_EQ(words_for_damage(path, "bad"),
            path.string() + " is damaged: bad; there is no other checkpoint in " +
                folder_.path().string());
  put_good(kTwenty);
  EXPECT_EQ(words_for_damage(path, "bad"),
            path.string() + " is damaged: bad; use another, " + at(kTwenty));
}

TEST_F(CheckpointFolder, TheLastGoodCheckpointIsBeforeTheStep) {
  const auto none = "there is no checkpoint in " + folder_.path().string() + " yet";
  EXPECT_EQ(words_for_last_good(folder_.path(), 30), none);
  put_good(kTen);
  put(kTwenty, "damaged");
  put_good(kThirty);
  EXPECT_EQ(words_for_last_good(folder_.path(), 30), "the last good checkpoint is " + at(kTen));
  EXPECT_EQ(words_for_last_good(folder_.path(), 10), none);
}

TEST_F(CheckpointFolder, ARunMakesItsFolder) {
  prepare_folder(*connect(), folder_ / "a/b", {});
  EXPECT_TRUE(fs::is_directory(folder_ / "a/b"));
}

TEST_F(CheckpointFolder, ARunDoesNotSaveIntoAnothersFolder) {
  const auto path = put_good(kTen);
  const auto refusal = "--save " + folder_.path().string() +
                       " holds checkpoints of another run, up to step-00000010.safetensors; "
                       "continue that run with --resume " +
                       folder_.path().string() + ", or choose another folder";
  EXPECT_EQ(prepare({}), refusal);
  EXPECT_EQ(prepare("elsewhere/step-00000010.safetensors"), refusal);
  EXPECT_EQ(prepare(path), "no error");
  EXPECT_EQ(prepare(folder_.path()), "no error");
}

TEST_F(CheckpointFolder, OneRunAtATimeSaves) {
  run_ranks(2, [&](Communicator& world) {
    const auto first = prepare_folder(world, folder_.path(), {});
    EXPECT_EQ(first != nullptr, world.rank() == 0);
    EXPECT_EQ(error_of<InvalidArgument>([&] { prepare_folder(world, folder_.path(), {}); }),
              "--save " + folder_.path().string() +
                  ": another run is saving there; end it, or choose another folder");
  });
  EXPECT_EQ(prepare({}), "no error");
}

TEST_F(CheckpointFolder, ARunDoesNotBeginIfItCannotSave) {
  put("file");
  run_ranks(3, [&](Communicator& world) {
    EXPECT_EQ(error_of<StorageError>([&] { prepare_folder(world, folder_ / "file", {}); }),
              "--save " + at("file") +
                  ": cannot save there: Not a directory; choose another folder, or none");
  });
  fs::permissions(folder_.path(), fs::perms::owner_read | fs::perms::owner_exec |
                                      fs::perms::others_read | fs::perms::others_exec);
  const auto error = testing::in_child([&] {
    constexpr uid_t kNobody = 65534;  // root may write anywhere
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) return std::string("still root");
    return error_of<StorageError>([&] { prepare_folder(*connect(), folder_.path(), {}); });
  });
  EXPECT_EQ(error, "--save " + folder_.path().string() +
                       ": cannot save there: Permission denied; choose another folder, or none");
}

TEST_F(CheckpointFolder, LeftoversOfKilledRunsAreRemovedAtOnce) {
  put(".step-00000010.safetensors.tmp-1");
  put(".letter.tmp-1");
  EXPECT_EQ(prepare({}), "no error");
  EXPECT_EQ(folder_.names(), Names{".letter.tmp-1"});
}

TEST_F(CheckpointFolder, WithoutALockOnlyOldLeftoversAreRemoved) {
  const auto old = put(".step-00000010.safetensors.tmp-1");
  put(".step-00000010.safetensors.tmp-2");
  fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::hours(2));
  remove_leftovers(folder_.path(), true);
  EXPECT_EQ(folder_.names(), Names{".step-00000010.safetensors.tmp-2"});
}

TEST_F(CheckpointFolder, FilesThatAnotherRunIsSavingStay) {
  const auto lock = prepare_folder(*connect(), folder_.path(), {});
  put(".step-00000010.safetensors.tmp-1");
  EXPECT_NE(prepare({}).find("another run is saving there"), std::string::npos);
  EXPECT_EQ(folder_.names(), Names{".step-00000010.safetensors.tmp-1"});
}

}  // namespace
}  // namespace switchyard::train::checkpoint_folder_test
