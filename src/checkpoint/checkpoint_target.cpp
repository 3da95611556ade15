// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_target.h"

#include <system_error>

#include "core/require.h"
#include "io/replacement.h"

namespace switchyard {

namespace fs = std::filesystem;

namespace {

std::string_view kind_of(const fs::path& path, fs::file_status status) {
  std::error_code ignored;
  if (fs::is_symlink(fs::symlink_status(path, ignored))) return "a link";
  if (fs::is_directory(status)) return "a folder";
  return fs::is_regular_file(status) ? "not a folder" : "not a regular file";
}

}  // namespace

bool is_of_checkpoints(const fs::directory_entry& entry) {
  const auto name = entry.path().filename().string();
  std::error_code ignored;
  return entry.is_regular_file(ignored) &&
         (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

void require_replaceable(const fs::path& path, CheckpointForm form) {
  std::error_code error;
  const bool is_file = form == CheckpointForm::one_file;
  // A new file may replace a link to a file, but a new folder cannot replace a link.
  const auto status = is_file ? fs::status(path, error) : fs::symlink_status(path, error);
  require(error != std::errc::filename_too_long, "cannot save to {}: {}", path.string(),
          error.message());
  if (!fs::exists(status)) return;
  require(is_file ? fs::is_regular_file(status) : fs::is_directory(status),
          "{} is {}, but the checkpoint is to be {}", path.string(), kind_of(path, status),
          is_file ? "one file" : "a folder with one file per rank");
  if (!is_file) require_removable(path, path.string(), is_of_checkpoints);
}

}  // namespace switchyard
