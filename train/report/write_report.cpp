// SPDX-License-Identifier: Apache-2.0
// Replaces the previous report atomically, or leaves it untouched on failure.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>
#include <system_error>

#include "report/report.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

template <typename Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// The functions below return an errno value, or 0 on success.
int write_whole(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = retried([&] { return ::write(file, bytes.data(), bytes.size()); });
    if (written < 0) return errno;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

int sync_file(int file) {
  return retried([&] { return ::fsync(file); }) == 0 ? 0 : errno;
}

int close_file(int file) { return ::close(file) == 0 ? 0 : errno; }

int write_new_file(const fs::path& path, std::string_view bytes) {
  constexpr mode_t kMode = 0666;  // minus the umask
  const int file = retried(
      [&] { return ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, kMode); });
  if (file < 0) return errno;
  int reason = write_whole(file, bytes);
  if (reason == 0) reason = sync_file(file);
  const int closing = close_file(file);
  return reason != 0 ? reason : closing;
}

int replace_file(const fs::path& path, std::string_view bytes) {
  const auto name = fmt::format(".{}.tmp-{}", path.filename().string().substr(0, 200), ::getpid());
  const auto temporary = path.parent_path() / name;
  int reason = write_new_file(temporary, bytes);
  if (reason == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) reason = errno;
  if (reason != 0) ::unlink(temporary.c_str());
  return reason;
}

// Fails if nobody reads the pipe: waiting for a reader would stall the run.
int write_in_place(const fs::path& path, std::string_view bytes) {
  const int file = retried([&] {
    return ::open(path.c_str(), O_WRONLY | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  });
  if (file < 0) return errno;
  int reason = ::fcntl(file, F_SETFL, O_APPEND) == 0 ? 0 : errno;  // block on a slow reader
  if (reason == 0) reason = write_whole(file, bytes);
  const int closing = close_file(file);
  return reason != 0 ? reason : closing;
}

// Resolves symlinks, even if the final target does not exist.
fs::path followed(fs::path path) {
  constexpr int kMostLinks = 40;  // the kernel's limit
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, error); ++i) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

bool is_open_as(int file, const struct stat& info) {
  struct stat own {};
  return ::fstat(file, &own) == 0 && own.st_dev == info.st_dev && own.st_ino == info.st_ino;
}

// Replaces only a regular file or a missing one. Writes directly to devices, pipes and whatever
// stdout or stderr lead to, such as a log. (rename refuses a folder by itself.)
int put_file(const fs::path& path, std::string_view bytes) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? replace_file(followed(path), bytes) : errno;
  }
  for (const int own : {STDOUT_FILENO, STDERR_FILENO}) {
    if (is_open_as(own, info)) return write_whole(own, bytes);
  }
  const bool makes_room = S_ISREG(info.st_mode) || S_ISDIR(info.st_mode);
  return makes_room ? replace_file(followed(path), bytes) : write_in_place(path, bytes);
}

}  // namespace

void write_report(const fs::path& path, const RunSummary& run) {
  const int reason = put_file(path, report_html(run));
  if (reason == 0) return;
  throw StorageError(fmt::format("cannot write the report {}: {}", path.string(),
                                 std::generic_category().message(reason)));
}

}  // namespace switchyard::train
