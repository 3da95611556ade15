// SPDX-License-Identifier: Apache-2.0
#include "io/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::size_t kMostAtOnce = std::size_t{64} << 20;  // per system call
constexpr std::int64_t kStagedBytes = 1 << 20;

int open_file(const std::filesystem::path& path, int flags) {
  constexpr mode_t kMode = 0666;  // before the umask
  return retried([&] { return ::open(path.c_str(), flags | O_WRONLY | O_CLOEXEC, kMode); });
}

}  // namespace

void throw_storage_error(std::string_view action, std::string_view name) {
  throw StorageError(
      fmt::format("cannot {} {}: {}", action, name, std::generic_category().message(errno)));
}

FileWriter::FileWriter(int descriptor, std::string name)
    : descriptor_(descriptor), name_(std::move(name)) {}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)) {}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

FileWriter FileWriter::create(const std::filesystem::path& path, const std::string& name) {
  const int descriptor = open_file(path, O_CREAT | O_EXCL);
  if (descriptor < 0) throw_storage_error("create", name);
  return {descriptor, name};
}

FileWriter FileWriter::open(const std::filesystem::path& path, const std::string& name) {
  const int descriptor = open_file(path, 0);
  if (descriptor < 0) throw_storage_error("open", name);
  return {descriptor, name};
}

void FileWriter::reserve(std::int64_t bytes) const {
  if (bytes == 0) return;
  // posix_fallocate would write to every block where the file system has no such operation.
  auto failed = retried([&] { return ::fallocate(descriptor_, 0, 0, bytes); });
  if (failed != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
    failed = retried([&] { return ::ftruncate(descriptor_, bytes); });
  }
  if (failed != 0) throw_storage_error(fmt::format("reserve {} bytes for", bytes), name_);
}

void FileWriter::write(std::span<const std::byte> bytes, std::int64_t offset) const {
  const auto total = bytes.size();
  while (!bytes.empty()) {
    const auto count = std::min(bytes.size(), kMostAtOnce);
    const auto written =
        retried([&] { return ::pwrite(descriptor_, bytes.data(), count, offset); });
    if (written < 0) {
      throw_storage_error(fmt::format("write {} bytes at {} of", total, offset), name_);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += written;
  }
}

void FileWriter::write(const ConstTensorView& view, std::int64_t offset) const {
  if (view.is_contiguous()) {
    write(std::span(view.data(), static_cast<std::size_t>(view.bytes())), offset);
    return;
  }
  // Stages short rows, so that one system call writes many of them.
  const auto row_bytes = view.row_bytes();
  const auto rows_at_once =
      std::max<std::int64_t>(1, kStagedBytes / std::max(row_bytes, std::int64_t{1}));
  std::vector<std::byte> staged(
      static_cast<std::size_t>(std::min(rows_at_once, view.rows()) * row_bytes));
  for (std::int64_t first = 0; first < view.rows(); first += rows_at_once) {
    const auto rows = std::min(rows_at_once, view.rows() - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(staged.data() + r * row_bytes, view.row(first + r),
                  static_cast<std::size_t>(row_bytes));
    }
    write(std::span(staged).first(static_cast<std::size_t>(rows * row_bytes)),
          offset + first * row_bytes);
  }
}

void FileWriter::sync() const {
  if (retried([&] { return ::fsync(descriptor_); }) != 0) throw_storage_error("sync", name_);
}

void sync_folder(const std::filesystem::path& path) {
  const int descriptor =
      retried([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) throw_storage_error("open the folder", path.string());
  const auto failed = retried([&] { return ::fsync(descriptor); });
  const int reason = errno;
  ::close(descriptor);
  // Some file systems cannot sync a folder and keep its names durable in another way.
  if (failed == 0 || reason == EINVAL || reason == EBADF || reason == EROFS) return;
  errno = reason;
  throw_storage_error("sync the folder", path.string());
}

}  // namespace switchyard
