// SPDX-License-Identifier: Apache-2.0
#include "options/options.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::train::options_test {
namespace {

using testing::error_of;

std::string error_of_setting(const std::string& name, const std::string& value) {
  TrainConfig config;
  return error_of<InvalidArgument>([&] { assign(config, {{name, value}}); });
}

std::string get(TrainConfig config, const std::string& name) {
  for (const auto& option : options_of(config)) {
    if (option.name == name) return option.get();
  }
  return "no option";
}

// A value of each option that is not its default.
Assignments other_values() {
  return {{"layers", "6"},
          {"hidden", "96"},
          {"heads", "3"},
          {"context", "77"},
          {"experts", "5"},
          {"top-k", "1"},
          {"intermediate", "33"},
          {"shared-intermediate", "44"},
          {"moe-every", "2"},
          {"dense-intermediate", "55"},
          {"tied", "false"},
          {"balance", "loss"},
          {"balance-rate", "0.25"},
          {"balance-weight", "0.1"},
          {"z-weight", "1e-05"},
          {"sizing", "bounded"},
          {"learning-rate", "0.007"},
          {"final-learning-rate", "1.1e-06"},
          {"warm-up", "0"},
          {"ranks", "3"},
          {"beta1", "0.8"},
          {"beta2", "0.99"},
          {"epsilon", "1e-07"},
          {"weight-decay", "0"},
          {"clip", "2.5"},
          {"dp", "2"},
          {"ep", "3"},
          {"sp", "4"},
          {"expert-axes", "ep+sp"},
          {"corpus", "some text"},
          {"batch", "9"},
          {"held-out", "10"},
          {"steps", "1000000"},
          {"seed", "18446744073709551615"},
          {"threads", "2"},
          {"evaluate-every", "0"},
          {"save", "a/b"},
          {"every", "7"},
          {"keep", "1"},
          {"resume", "c"},
          {"report", "none"},
          {"prompt", "\"quoted\"\n"},
          {"sample-bytes", "0"},
          {"temperature", "0"}};
}

TEST(Options, EveryValueIsSetAndRead) {
  TrainConfig config;
  std::set<std::string> names;
  for (const auto& option : options_of(config)) {
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    EXPECT_FALSE(option.section.empty() || option.type.empty() || option.help.empty());
  }
  for (const auto& [name, value] : other_values()) {
    EXPECT_NE(get(config, name), value) << name;
    assign(config, {{name, value}});
    EXPECT_EQ(get(config, name), value) << name;
    names.erase(name);
  }
  EXPECT_TRUE(names.empty()) << *names.begin();
  EXPECT_EQ(config.model.balance, Balance::loss);
  EXPECT_EQ(config.model.sizing, BufferSizing::bounded);
  EXPECT_EQ(config.mesh.expert_axes, (std::vector<std::string>{"ep", "sp"}));
  EXPECT_EQ(config.optimizer.final_learning_rate, 1.1e-6F);
  EXPECT_EQ(config.report, "");
}

TEST(Options, EmptyPathsHaveNames) {
  TrainConfig config;
  EXPECT_EQ(get(config, "corpus"), "embedded");
  EXPECT_EQ(get(config, "save"), "none");
  assign(config, {{"corpus", "x"}, {"save", "y"}});
  assign(config, {{"corpus", "embedded"}, {"save", "none"}});
  EXPECT_EQ(config.data.corpus, "");
  EXPECT_EQ(config.save, "");
  EXPECT_EQ(error_of_setting("corpus", ""), "--corpus \"\" is neither a path nor embedded");
  for (const std::string name : {"save", "resume", "report"}) {
    EXPECT_EQ(error_of_setting(name, ""), "--" + name + " \"\" is neither a path nor none");
  }
}

TEST(Options, WrongValuesAreNamed) {
  const std::string whole = " is not a whole number from 1 to 65536";
  for (const std::string value :
       {"12x", "", " 12", "+12", "1.5", "1e3", "0", "65537", "-3", "99999999999999999999"}) {
    EXPECT_EQ(error_of_setting("hidden", value), "--hidden \"" + value + "\"" + whole);
  }
  for (const std::string value : {"nan", "inf", "-0.1", "11", "1e400", "0.1f", "0,1", "."}) {
    EXPECT_EQ(error_of_setting("learning-rate", value),
              "--learning-rate \"" + value + "\" is not a number from 0 to 10");
  }
  EXPECT_EQ(error_of_setting("seed", "-1"),
            "--seed \"-1\" is not a whole number from 0 to 18446744073709551615");
  EXPECT_EQ(error_of_setting("balance", "Bias"), "--balance \"Bias\" is not one of bias|loss|none");
  EXPECT_EQ(error_of_setting("tied", "1"), "--tied \"1\" is not one of true|false");
  EXPECT_EQ(error_of_setting("every", "0"),
            "--every \"0\" is not a whole number from 1 to 1000000000");
}

TEST(Options, UnknownNamesGetTheClosest) {
  EXPECT_EQ(error_of_setting("hiden", "1"),
            "\"hiden\" is not an option; the closest is \"hidden\"");
  EXPECT_EQ(error_of_setting("learning_rate", "1"),
            "\"learning_rate\" is not an option; the closest is \"learning-rate\"");
  EXPECT_EQ(error_of_setting("", "1"), "\"\" is not an option");
}

TEST(OptionsJson, KeepsEveryValue) {
  TrainConfig config;
  assign(config, other_values());
  TrainConfig read;
  assign(read, parse_config(to_json(config), "it"));
  for (const auto& [name, value] : other_values()) EXPECT_EQ(get(read, name), value);
  assign(read, parse_config(to_json(TrainConfig{}), "it"));
  EXPECT_EQ(to_json(read), to_json(TrainConfig{}));
}

TEST(OptionsJson, TakesNumbersTruthValuesAndStrings) {
  const auto text = to_json(TrainConfig{});
  for (const char* line : {"\"hidden\": 128,", "\"learning-rate\": 0.003,", "\"tied\": true,",
                           "\"balance\": \"bias\",", "\"corpus\": \"embedded\","}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
  TrainConfig config;
  assign(config, parse_config(R"({"hidden": "64", "tied": "false", "clip": 2, "steps": 7})", "it"));
  EXPECT_EQ(config.model.hidden, 64);
  EXPECT_FALSE(config.model.tied);
  EXPECT_EQ(config.optimizer.clip, 2.0F);
  EXPECT_EQ(config.steps, 7);
}

TEST(OptionsJson, WrongFilesAreNamed) {
  const auto error = [](const std::string& text) {
    return error_of<InvalidArgument>([&] { parse_config(text, "my.json"); });
  };
  EXPECT_EQ(error("{\n\"hidden\": 12,\n\"steps\" 5}"), "my.json is not JSON: an error in line 3");
  EXPECT_EQ(error(""), "my.json is not JSON: an error in line 1");
  EXPECT_EQ(error("[1]"), "my.json is not a JSON object of options");
  EXPECT_EQ(error(R"({"stepps": 1})"),
            "my.json: \"stepps\" is not an option; the closest is \"steps\"");
  EXPECT_EQ(error(R"({"steps": [1]})"),
            "my.json: \"steps\" must be a number, a string, true or false");
  EXPECT_EQ(error(R"({"steps": 1, "batch": 2, "steps": 3})"), "my.json has \"steps\" twice");
  EXPECT_EQ(error(R"({"steps": 1e400})"), "my.json has a number that is too large");
  EXPECT_EQ(error(R"({"steps": 1.5})"),
            "my.json: --steps \"1.5\" is not a whole number from 1 to 1000000000");
}

TEST(Merge, FlagsComeBeforeTheFile) {
  const auto config =
      merge(std::nullopt, {{"steps", "50"}, {"batch", "3"}}, {{"steps", "60"}, {"seed", "4"}});
  EXPECT_EQ(config.steps, 60);
  EXPECT_EQ(config.data.batch, 3);
  EXPECT_EQ(config.seed, 4U);
  EXPECT_EQ(config.model.hidden, TrainConfig{}.model.hidden);
}

TEST(Merge, UngivenOptionsAdaptToGivenOnes) {
  const auto config = merge(std::nullopt, {{"learning-rate", "1e-05"}}, {{"steps", "5"}});
  EXPECT_EQ(config.optimizer.warm_up, 20);  // a longer run that is made of it needs it whole
  EXPECT_EQ(config.optimizer.final_learning_rate, 1e-5F);
  check(config, 1);
  const auto given = merge(std::nullopt, {{"learning-rate", "1e-05"}},
                           {{"steps", "5"}, {"final-learning-rate", "1"}});
  EXPECT_EQ(given.optimizer.final_learning_rate, 1.0F);
  EXPECT_EQ(error_of<InvalidArgument>([] {
              merge(std::nullopt, {{"warm-up", "6"}}, {{"steps", "5"}});
            }),
            "--warm-up 6 must be at most --steps 5");
}

TEST(Merge, TheMeshIsTheCheckpointsOrNew) {
  TrainConfig checkpoint;
  checkpoint.mesh = {.ranks = 8, .dp = 2, .sp = 2, .expert_axes = {"ep", "sp"}};
  const auto kept = merge(checkpoint, {}, {{"steps", "9"}}).mesh;
  EXPECT_EQ(kept.ranks, 8);
  EXPECT_EQ(kept.dp, 2);
  for (const char* option : {"ranks", "dp", "ep", "sp"}) {
    const auto made = merge(checkpoint, {}, {{option, "3"}}).mesh;
    EXPECT_EQ(made.ranks, std::string(option) == "ranks" ? 3 : 0);
    EXPECT_EQ(made.dp, std::string(option) == "dp" ? 3 : 1);
    EXPECT_EQ(made.expert_axes, checkpoint.mesh.expert_axes);
  }
}

// mpirun may have started another number of processes than the checkpoint had.
TEST(FitMesh, GivesUpAMeshOfOtherRanks) {
  TrainConfig config;
  config.mesh = {.ranks = 8, .dp = 2, .sp = 2};
  fit_mesh(config, 8);
  EXPECT_EQ(config.mesh.dp, 2);
  fit_mesh(config, 3);
  EXPECT_EQ(config.mesh.dp, 1);
  EXPECT_EQ(config.mesh.ranks, 3);
}

TEST(Merge, AResumedRunStaysAsItWas) {
  TrainConfig checkpoint;
  assign(checkpoint, {{"hidden", "64"},
                      {"steps", "70"},
                      {"batch", "5"},
                      {"threads", "3"},
                      {"save", "there"},
                      {"report", "there.html"},
                      {"corpus", "text"}});
  const auto config =
      merge(checkpoint, {{"hidden", "64"}, {"resume", "ck"}}, {{"batch", "6"}, {"context", "8"}});
  EXPECT_EQ(config.model.hidden, 64);
  EXPECT_EQ(config.model.context, 8);
  EXPECT_EQ(config.steps, 70);
  EXPECT_EQ(config.data.batch, 6);
  EXPECT_EQ(config.data.corpus, "text");
  EXPECT_EQ(config.threads, 0);
  EXPECT_EQ(config.save, "there");
  EXPECT_EQ(config.report, TrainConfig{}.report);
  EXPECT_EQ(config.resume, "ck");
}

TEST(Merge, NamesWhatAResumedRunMustKeep) {
  const Assignments resume{{"resume", "ck"}};
  std::set<std::string> fixed;
  for (const auto& [name, value] : other_values()) {
    const auto error = error_of<InvalidArgument>([&] {
      merge(TrainConfig{}, resume, {{name, value}});
    });
    if (error == "no error") continue;
    EXPECT_EQ(error, "--" + name + " " + value +
                         " cannot be changed: the run resumed from ck has " +
                         get(TrainConfig{}, name));
    fixed.insert(name);
  }
  EXPECT_EQ(fixed, (std::set<std::string>{"layers", "hidden", "heads", "experts", "top-k",
                                          "intermediate", "shared-intermediate", "moe-every",
                                          "dense-intermediate", "tied", "balance", "seed"}));
}

}  // namespace
}  // namespace switchyard::train::options_test
