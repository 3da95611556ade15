// SPDX-License-Identifier: Apache-2.0
#include "io/file_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/statfs.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <vector>

#include "support/child.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"

namespace switchyard::file_writer_test {
namespace {

using testing::error_of;
using testing::Folder;
using testing::in_child;

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(FileWriter, WritesAtPlacesInAnyOrder) {
  const Folder folder;
  const auto file = FileWriter::create(folder / "x", "x");
  file.reserve(10);
  EXPECT_EQ(contents_of(folder / "x"), std::string(10, '\0'));
  const auto other = FileWriter::open(folder / "x", "x");
  other.write(bytes_of("456789"), 4);
  file.write(bytes_of("0123"), 0);
  file.write(bytes_of(""), 3);
  file.sync();
  EXPECT_EQ(contents_of(folder / "x"), "0123456789");
}

// Rows of every length around what is staged at once, and one that is longer.
TEST(FileWriter, WritesRowsWithoutWhatLiesBetween) {
  const Folder folder;
  const auto file = FileWriter::create(folder / "x", "x");
  for (const std::int64_t columns : {1, 3, 1000, 400'000}) {
    const std::int64_t rows = columns < 1000 ? 700'001 / columns : 3;
    Tensor wide({rows, columns + 2}, Dtype::i32);
    for (std::size_t i = 0; i < wide.span<std::int32_t>().size(); ++i) {
      wide.span<std::int32_t>()[i] = static_cast<std::int32_t>(i);
    }
    file.write(ConstTensorView(wide.data(), Dtype::i32, {rows, columns}, columns + 2), 8);
    const auto written = contents_of(folder / "x");
    ASSERT_GE(written.size(), static_cast<std::size_t>(8 + rows * columns * 4));
    const auto* values = reinterpret_cast<const std::int32_t*>(written.data() + 8);
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      ASSERT_EQ(values[i], i / columns * (columns + 2) + i % columns) << columns << ", " << i;
    }
  }
}

TEST(FileWriter, NamesTheFileAndTheReason) {
  const Folder folder;
  EXPECT_EQ(error_of<StorageError>([&] { FileWriter::create(folder / "a/x", "a/x"); }),
            "cannot create a/x: No such file or directory");
  EXPECT_EQ(error_of<StorageError>([&] { FileWriter::open(folder / "x", "x"); }),
            "cannot open x: No such file or directory");
  FileWriter::create(folder / "x", "x");
  EXPECT_EQ(error_of<StorageError>([&] { FileWriter::create(folder / "x", "x"); }),
            "cannot create x: File exists");
  EXPECT_EQ(error_of<StorageError>([&] { sync_folder(folder / "none"); }),
            "cannot open the folder " + (folder / "none").string() + ": No such file or directory");
}

TEST(FileWriter, AFullDiskIsNamedWithWhatWasNeeded) {
  const auto full = FileWriter::open("/dev/full", "full");
  EXPECT_EQ(error_of<StorageError>([&] { full.write(bytes_of("four"), 17); }),
            "cannot write 4 bytes at 17 of full: No space left on device");
  EXPECT_EQ(error_of<StorageError>([&] { full.sync(); }), "cannot sync full: Invalid argument");
  struct statfs status = {};
  constexpr auto kTmpfs = 0x01021994;
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != kTmpfs) {
    GTEST_SKIP() << "/dev/shm is no tmpfs, which would refuse too much at once";
  }
  const std::filesystem::path path = "/dev/shm/switchyard-" + std::to_string(::getpid());
  const auto file = FileWriter::create(path, "x");
  std::filesystem::remove(path);
  EXPECT_EQ(error_of<StorageError>([&] { file.reserve(std::int64_t{1} << 50); }),
            "cannot reserve 1125899906842624 bytes for x: No space left on device");
}

TEST(FileWriter, ALimitOnFilesIsAnErrorToo) {
  const Folder folder;
  const auto error = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit = {1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto file = FileWriter::create(folder / "x", "x");
    // The bytes below the limit are still written, so the write of the rest fails.
    const auto writing =
        error_of<StorageError>([&] { file.write(bytes_of(std::string(1500, 'x')), 0); });
    return writing + "; " + error_of<StorageError>([&] { file.reserve(1001); });
  });
  EXPECT_EQ(error,
            "cannot write 1500 bytes at 1000 of x: File too large; "
            "cannot reserve 1001 bytes for x: File too large");
}

}  // namespace
}  // namespace switchyard::file_writer_test
