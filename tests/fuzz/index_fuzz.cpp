// Opens bytes as the index of a checkpoint of two small files, and reads every tensor it lists.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "fuzz_target.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

// "a.safetensors" has v and w, "b.safetensors" has x; the folder goes when the process ends.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "switchyard-fuzz-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
    write("a.safetensors", R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                           R"("w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[4,8]}})");
    write("b.safetensors", R"({"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})");
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  fs::path index() const { return path_ / "x.safetensors.index.json"; }

 private:
  // Both have eight bytes of data.
  void write(const std::string& name, const std::string& header) const {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    std::ofstream(path_ / name, std::ios::binary) << bytes + header + std::string(8, '\0');
  }

  fs::path path_;
};

void read_all(const Checkpoint& checkpoint) {
  for (const auto& [name, view] : checkpoint.tensors()) fuzz::touch(view);
  for (const auto& name : checkpoint.names()) {
    if (!checkpoint.file_of(name).contains(name)) std::abort();
  }
  if (checkpoint.files().size() > 2) std::abort();
}

}  // namespace
}  // namespace switchyard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const switchyard::Folder kFolder;
  std::ofstream(kFolder.index(), std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    switchyard::read_all(switchyard::Checkpoint::open(kFolder.index()));
  } catch (const switchyard::InvalidArgument&) {
    return 0;
  }
  return 0;
}
