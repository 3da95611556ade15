// SPDX-License-Identifier: Apache-2.0
#include "io/open_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "core/require.h"

namespace switchyard {
namespace {

std::string message_of(int reason) { return std::generic_category().message(reason); }

struct FolderCloser {
  void operator()(DIR* stream) const { ::closedir(stream); }
};

}  // namespace

OpenFolder::OpenFolder(std::filesystem::path path)
    : path_(std::move(path)),
      // O_PATH suffices to open files in a folder that this process may not list.
      descriptor_(::open(path_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
  require(descriptor_ >= 0, "cannot open the folder {}: {}", path_.string(), message_of(errno));
}

OpenFolder::~OpenFolder() { ::close(descriptor_); }

std::vector<std::string> OpenFolder::names() const {
  const int listed = ::openat(descriptor_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, FolderCloser> stream(listed >= 0 ? ::fdopendir(listed) : nullptr);
  int reason = errno;
  std::vector<std::string> names;
  if (stream) {
    errno = 0;
    while (const dirent* entry = ::readdir(stream.get())) names.emplace_back(entry->d_name);
    reason = errno;
  }
  require(stream && reason == 0, "cannot list the folder {}: {}", path_.string(),
          message_of(reason));
  std::erase_if(names, [](const auto& name) { return name == "." || name == ".."; });
  std::ranges::sort(names);
  return names;
}

bool OpenFolder::has(const std::string& name) const {
  struct stat ignored = {};
  return ::fstatat(descriptor_, name.c_str(), &ignored, 0) == 0;
}

MappedFile OpenFolder::map(const std::string& name) const {
  return map_file_in(descriptor_, name, (path_ / name).string());
}

bool OpenFolder::is_replaced() const {
  struct stat own = {};
  struct stat now = {};
  return ::fstat(descriptor_, &own) != 0 || ::stat(path_.c_str(), &now) != 0 ||
         own.st_dev != now.st_dev || own.st_ino != now.st_ino;
}

}  // namespace switchyard
