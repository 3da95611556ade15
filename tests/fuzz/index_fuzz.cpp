// SPDX-License-Identifier: Apache-2.0
// Opens bytes as the index of a checkpoint of two small files, and reads every tensor it lists.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "fuzz_target.h"
#include "switchyard/checkpoint.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

// "a.safetensors" has v and w, "b.safetensors" has x; the folder goes when the process ends.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "switchyard-fuzz-XXXXXX").string();
    fuzz::check(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    write("a.safetensors", R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                           R"("w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[4,8]}})");
    write("b.safetensors", R"({"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})");
    fs::create_symlink(index_.path(), index());
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void write_index(const std::uint8_t* data, std::size_t size) const { index_.write(data, size); }
  fs::path index() const { return path_ / "x.safetensors.index.json"; }

 private:
  // Both have eight bytes of data.
  void write(const std::string& name, const std::string& header) const {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    std::ofstream(path_ / name, std::ios::binary) << bytes + header + std::string(8, '\0');
  }

  fuzz::MemoryFile index_;
  fs::path path_;
};

void read_all(const Checkpoint& checkpoint) {
  for (const auto& name : checkpoint.names()) {
    const bool is_readable = checkpoint.file_of(name).info(name).is_readable;
    fuzz::check(is_readable == checkpoint.tensors().contains(name));
    if (is_readable) fuzz::touch(checkpoint.tensor(name));
  }
  fuzz::check(checkpoint.files().size() <= 2);
}

}  // namespace
}  // namespace switchyard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const switchyard::Folder kFolder;
  kFolder.write_index(data, size);
  if (const auto checkpoint = switchyard::fuzz::open<switchyard::Checkpoint>(kFolder.index())) {
    switchyard::read_all(*checkpoint);
  }
  return 0;
}
