// SPDX-License-Identifier: Apache-2.0
// Reading a checkpoint's header, and the errors for values that make no sense.
#include "checkpoints/checkpoint_header.h"

#include <gtest/gtest.h>

#include "switchyard/build_info.h"
#include "train/saved_run.h"

namespace switchyard::train::checkpoint_header_test {
namespace {

CheckpointHeader some_header() {
  CheckpointHeader header{.path = "x",
                          .config = small_config(),
                          .progress = {.step = 12, .position = 345},
                          .corpus = "a \"book\"\xff",
                          .corpus_hash = ~std::uint64_t{0},
                          .parameters_sum = 1,
                          .training_sum = 0xfedcba9876543210U};
  header.config.optimizer.learning_rate = 0.1F;  // not a short number
  header.config.mesh.expert_axes = {"ep", "sp"};
  header.config.data.corpus = "/a/b c";
  return header;
}

TEST(CheckpointHeader, IsReadBackAsWritten) {
  const auto before = some_header();
  const auto after = header_from(to_metadata(before), "x");
  EXPECT_EQ(after.path, "x");
  EXPECT_EQ(to_json(after.config), to_json(before.config));
  EXPECT_EQ(after.config.optimizer.learning_rate, 0.1F);
  EXPECT_EQ(after.progress.step, 12);
  EXPECT_EQ(after.progress.position, 345);
  EXPECT_EQ(after.corpus, "a \"book\"\xef\xbf\xbd");  // what is no UTF-8 cannot be JSON
  EXPECT_EQ(after.corpus_hash, before.corpus_hash);
  EXPECT_EQ(after.parameters_sum, before.parameters_sum);
  EXPECT_EQ(after.training_sum, before.training_sum);
}

class CheckpointHeaderErrors : public ::testing::Test {
 protected:
  std::string error() const {
    return testing::error_of<InvalidArgument>([&] { header_from(metadata_, "none/x"); });
  }
  std::string with(const std::string& name, const std::string& value) {
    metadata_[name] = value;
    return error();
  }
  static std::string damaged(const std::string& what) {
    return "none/x is damaged: " + what + "; there is no other checkpoint in none";
  }

  Metadata metadata_ = to_metadata(some_header());
};

TEST_F(CheckpointHeaderErrors, NumbersThatMakeNoSense) {
  EXPECT_EQ(with("train.step", "-1"), damaged("train.step must be a number, not \"-1\""));
  EXPECT_EQ(with("train.step", "1e3"), damaged("train.step must be a number, not \"1e3\""));
  EXPECT_EQ(with("train.step", ""), damaged("train.step must be a number, not \"\""));
  EXPECT_EQ(with("train.step", "9223372036854775808"),
            damaged("train.step must be a number, not \"9223372036854775808\""));
  metadata_ = to_metadata(some_header());
  EXPECT_EQ(with("train.position", "x"), damaged("train.position must be a number, not \"x\""));
  EXPECT_EQ(with("train.position", "11"),
            damaged("train.position must be 12 to 12582912 after 12 steps, not 11"));
  EXPECT_EQ(with("train.position", "12582913"),
            damaged("train.position must be 12 to 12582912 after 12 steps, not 12582913"));
  EXPECT_EQ(with("train.step", "1000000001"),
            damaged("train.step must be at most 1000000000, not 1000000001"));
  metadata_ = to_metadata(some_header());
  EXPECT_EQ(with("train.training_sum", "xyz"),
            damaged("train.training_sum must be a hexadecimal number, not \"xyz\""));
}

TEST_F(CheckpointHeaderErrors, FieldsThatAreMissing) {
  for (const auto* name :
       {"train.config", "train.step", "train.position", "train.corpus", "train.corpus_hash",
        "train.parameters_sum", "train.training_sum", "train.metadata_sum"}) {
    metadata_ = to_metadata(some_header());
    metadata_.erase(name);
    EXPECT_EQ(error(), damaged("it has no " + std::string(name)));
  }
}

TEST_F(CheckpointHeaderErrors, AConfigThatCannotBeRead) {
  EXPECT_TRUE(with("train.config", "{").starts_with("none/x is damaged: train.config"));
  EXPECT_TRUE(with("train.config", R"({"layers":"many"})").starts_with("none/x is damaged: "));
  EXPECT_NE(error().find("many"), std::string::npos) << error();
}

TEST_F(CheckpointHeaderErrors, AValueThatChangedSinceItWasSaved) {
  EXPECT_EQ(with("train.step", "13"), damaged("its metadata does not match its checksum"));
  metadata_ = to_metadata(some_header());
  EXPECT_EQ(with("format", "pt"), "no error") << "that is not ours";
}

TEST_F(CheckpointHeaderErrors, AnotherFormatNamesBoth) {
  const auto ours = std::string(version());
  metadata_["train.version"] = "9.9.9";
  EXPECT_EQ(with("train.format", "2"),
            "none/x has format 2 of Switchyard 9.9.9, but this is "
            "Switchyard " +
                ours + ", which reads format 1");
  metadata_.erase("train.version");
  EXPECT_EQ(error(), "none/x has format 2 of Switchyard ?, but this is Switchyard " + ours +
                         ", which reads format 1");
  metadata_.erase("train.format");
  EXPECT_EQ(error(),
            "none/x is not a checkpoint of a training run: its metadata has no train.format");
}

}  // namespace
}  // namespace switchyard::train::checkpoint_header_test
