// SPDX-License-Identifier: Apache-2.0
#include "common/bus_faults.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/folder.h"
#include "switchyard/safetensors.h"

namespace switchyard::train::bus_faults_test {
namespace {

namespace fs = std::filesystem;

struct End {
  int status = 0;
  std::string said;  // on the standard error
};

template <typename Body>
End in_process(const Body& body) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  End end;
  std::array<char, 256> buffer{};
  for (ssize_t n = 0; (n = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
    end.said.append(buffer.data(), static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  ::waitpid(child, &end.status, 0);
  return end;
}

TEST(BusFaults, NameTheTruncatedFile) {
  const testing::Folder folder;
  const auto path = folder / "x.safetensors";
  std::string header = R"({"x":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]}})";
  header.resize(88, ' ');
  std::ofstream(path, std::ios::binary)
      << std::string("\x58\0\0\0\0\0\0\0", 8) << header << std::string(16384, '\0');
  const auto end = in_process([&] {
    explain_bus_faults();
    const auto view = SafetensorsFile::open(path).tensor("x");
    fs::resize_file(path, 96);
    const volatile float last = view.span<float>().back();
    (void)last;
  });
  ASSERT_TRUE(WIFSIGNALED(end.status));
  EXPECT_EQ(WTERMSIG(end.status), SIGBUS);
  EXPECT_EQ(end.said,
            "switchyard: a file was truncated while it was being read, or its disk failed: " +
                path.string() + "\n");
}

}  // namespace
}  // namespace switchyard::train::bus_faults_test
