// SPDX-License-Identifier: Apache-2.0
#include "data/corpus.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "data/embedded_text.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard::train::corpus_test {
namespace {

using testing::error_of;
using testing::Folder;

void write(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

std::string content_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string error_of_reading(const std::filesystem::path& path) {
  return error_of<InvalidArgument>([&] { Corpus::read(path); });
}

// Both parts of `text`, by the definition.
void expect_text(const Corpus& corpus, std::string_view text, std::size_t chunk) {
  std::string training;
  std::string held_out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    (i / chunk % 10 == 9 ? held_out : training) += text[i];
  }
  EXPECT_EQ(corpus.training(), training);
  EXPECT_EQ(corpus.held_out(), held_out);
}

TEST(Corpus, HoldsOutEveryTenthChunk) {
  const std::string few = "abcdefghijklmnopqrstuvwxyz";
  expect_text(Corpus("few", few), few, 1);
  EXPECT_EQ(Corpus("few", few).held_out(), "jt");
  std::string many;
  for (int i = 0; i < 30000; ++i) many += std::to_string(i) + ' ';
  expect_text(Corpus("many", many), many, 4096);
}

TEST(Corpus, HashTellsTextsApart) {
  const std::string text(100, 'x');
  std::string other = text;
  other[57] = 'y';
  EXPECT_EQ(Corpus("a", text).hash(), Corpus("b", text).hash());
  EXPECT_NE(Corpus("a", text).hash(), Corpus("a", other).hash());
  EXPECT_NE(Corpus("a", text).hash(), Corpus("a", text + "x").hash());
}

TEST(Corpus, TheEmbeddedTextIsThatOfItsFile) {
  const std::filesystem::path folder = std::filesystem::path(SWITCHYARD_SOURCE) / "train/data/text";
  const auto text = embedded_text();
  EXPECT_EQ(text, content_of(folder / "king_james_bible.txt"));
  EXPECT_EQ(text.size(), 1'473'377U);  // as its README says, and so are the losses in the docs
  const auto corpus = Corpus::embedded();
  EXPECT_EQ(corpus.name(), "the King James Bible (Genesis, Psalms, New Testament)");
  EXPECT_EQ(corpus.training().size() + corpus.held_out().size(), text.size());
}

TEST(Corpus, ReadsAFile) {
  const Folder folder;
  const std::string text = "0123456789012345678\0" + std::string(200000, 'z');
  write(folder / "text", text);
  std::filesystem::create_symlink(folder / "text", folder / "link");
  for (const auto& path : {folder / "text", folder / "link"}) {  // a link that is asked for is read
    const auto corpus = Corpus::read(path);
    EXPECT_EQ(corpus.name(), path.string());
    expect_text(corpus, text, 4096);
  }
}

TEST(Corpus, ReadsTheTextFilesOfAFolder) {
  const Folder folder;
  write(folder / "b.txt", "second, ");
  write(folder / "a/z/deep", "first, ");
  write(folder / "c", "and third. ");
  write(folder / "late", std::string(8191, '.') + 'L' + '\0');
  write(folder / "binary", std::string(8191, 'B') + '\0');
  write(folder / ".hidden", "hidden");
  write(folder / ".git/config", "hidden, too");
  std::filesystem::create_symlink(folder / "c", folder / "link");
  std::filesystem::create_directory_symlink(folder / "a", folder / "again");
  const auto corpus = Corpus::read(folder.path());
  const std::string late = std::string(8191, '.') + 'L' + '\0';
  const std::string text = "first, second, and third. " + late;
  expect_text(corpus, text, text.size() / 20);
  EXPECT_EQ(corpus.hash(), Corpus("", text).hash());
}

TEST(Corpus, NamesAPathThatCannotBeRead) {
  const Folder folder;
  const auto missing = (folder / "missing").string();
  EXPECT_EQ(error_of_reading(missing),
            "the corpus " + missing + " cannot be read: No such file or directory");
  std::filesystem::create_symlink(folder / "missing", folder / "dangling");
  EXPECT_EQ(error_of_reading(folder / "dangling"),
            "the corpus " + (folder / "dangling").string() +
                " cannot be read: No such file or directory");
  EXPECT_EQ(error_of_reading("/dev/null"), "the corpus /dev/null is neither a file nor a folder");
  EXPECT_EQ(error_of_reading("/proc/self/mem"),
            "the corpus /proc/self/mem cannot be read: Input/output error");
  std::filesystem::create_directory(folder / "locked");
  std::filesystem::permissions(folder / "locked", std::filesystem::perms::none);
  const auto locked = error_of_reading(folder.path());
  std::filesystem::permissions(folder / "locked", std::filesystem::perms::owner_all);
  if (::geteuid() != 0) {  // for whom nothing is locked
    EXPECT_EQ(locked,
              "the corpus " + folder.path().string() + " cannot be read: Permission denied");
  }
}

TEST(Corpus, NamesAPathThatHoldsTooLittleOrTooMuch) {
  const Folder folder;
  EXPECT_EQ(error_of_reading(folder.path()),
            "the corpus " + folder.path().string() + " has 0 bytes of text, too few to train on");
  write(folder / "short", "nineteen characters");
  EXPECT_EQ(error_of_reading(folder / "short"), "the corpus " + (folder / "short").string() +
                                                    " has 19 bytes of text, too few to train on");
  write(folder / "long", "");
  std::filesystem::resize_file(folder / "long", (std::uintmax_t{4} << 30) + 1);
  EXPECT_EQ(error_of_reading(folder / "long"),
            "the corpus " + (folder / "long").string() +
                " has 4294967297 bytes, but must have at most 4294967296 (4 GiB)");
}

TEST(SharedCorpus, IsReadOnceByAllWhoHoldIt) {
  const Folder folder;
  write(folder / "text", std::string(1000, 'a'));
  const auto path = (folder / "text").string();
  auto first = shared_corpus(path);
  write(folder / "text", std::string(2000, 'b'));
  EXPECT_EQ(shared_corpus(path), first);
  EXPECT_NE(shared_corpus(""), first);
  first.reset();
  EXPECT_EQ(shared_corpus(path)->bytes(), 2000) << "nobody held it any more";
}

}  // namespace
}  // namespace switchyard::train::corpus_test
