// Puts a report in place of the one before at once, or leaves that alone.
#include <fcntl.h>
#include <fmt/format.h>
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

// Returns the error's number, 0 if there was none.
int write_whole(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = retried([&] { return ::write(file, bytes.data(), bytes.size()); });
    if (written < 0) return errno;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return retried([&] { return ::fsync(file); }) == 0 ? 0 : errno;
}

int write_to(const fs::path& path, std::string_view bytes) {
  constexpr mode_t kMode = 0666;  // less what the user's mask takes away
  const int file = retried(
      [&] { return ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, kMode); });
  if (file < 0) return errno;
  const int reason = write_whole(file, bytes);
  const int closing = ::close(file) == 0 ? 0 : errno;
  return reason != 0 ? reason : closing;
}

}  // namespace

void write_report(const fs::path& path, const RunSummary& run) {
  const auto name = fmt::format(".{}.tmp-{}", path.filename().string().substr(0, 200), ::getpid());
  const auto temporary = path.parent_path() / name;
  int reason = write_to(temporary, report_html(run));
  if (reason == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) reason = errno;
  if (reason == 0) return;
  ::unlink(temporary.c_str());
  throw StorageError(fmt::format("cannot write the report {}: {}", path.string(),
                                 std::generic_category().message(reason)));
}

}  // namespace switchyard::train
