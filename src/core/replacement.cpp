#include "core/replacement.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>
#include <utility>

#include "core/file_writer.h"

namespace switchyard {
namespace {

constexpr std::size_t kMostOfName = 200;  // of the 255 bytes that a name may have

bool rename_to(const std::filesystem::path& from, const std::filesystem::path& to) {
  return std::rename(from.c_str(), to.c_str()) == 0;
}

bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

bool is_unsupported(int reason) {
  return reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP;
}

}  // namespace

std::filesystem::path temporary_beside(const std::filesystem::path& path, std::string_view token) {
  const auto name = path.filename().string().substr(0, kMostOfName);
  return path.parent_path() / fmt::format(".{}.tmp-{}", name, token);
}

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

Replacement::Replacement(std::filesystem::path path, std::string_view token)
    : path_(std::move(path)), temporary_(temporary_beside(path_, token)) {}

Replacement::~Replacement() {
  std::error_code ignored;  // whether it can be removed changes nothing about what is in its place
  std::filesystem::remove_all(temporary_, ignored);
}

void replace_in_two_steps(const std::filesystem::path& temporary,
                          const std::filesystem::path& path) {
  const auto aside = temporary_beside(path, random_token());
  if (!rename_to(path, aside)) throw_storage_error("move aside", path.string());
  if (!rename_to(temporary, path)) {
    const int reason = errno;
    rename_to(aside, path);
    errno = reason;
    throw_storage_error("replace", path.string());
  }
  rename_to(aside, temporary);
}

void Replacement::commit() {
  // Replaces a file or an empty folder at once, and refuses a folder that holds something.
  if (!rename_to(temporary_, path_)) {
    if (errno != EEXIST && errno != ENOTEMPTY) throw_storage_error("replace", path_.string());
    if (!exchange(temporary_, path_)) {
      if (!is_unsupported(errno)) throw_storage_error("replace", path_.string());
      replace_in_two_steps(temporary_, path_);
    }
  }
  sync_folder(path_.has_parent_path() ? path_.parent_path() : ".");
}

}  // namespace switchyard
