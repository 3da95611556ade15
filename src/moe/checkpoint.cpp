#include "switchyard/checkpoint.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/require.h"

namespace switchyard {

struct Checkpoint::Contents {
  std::filesystem::path path;
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsFile> files;
  NamedTensors tensors;
};

Checkpoint::Checkpoint(std::shared_ptr<const Contents> contents) : contents_(std::move(contents)) {}

Checkpoint Checkpoint::open(const std::filesystem::path& path) {
  Contents contents;
  contents.path = path;
  if (std::filesystem::is_directory(path)) {
    std::ifstream stream(path / "model.safetensors.index.json");
    const auto index = nlohmann::json::parse(stream);
    for (const auto& [key, value] : index.at("metadata").items()) {
      if (value.is_string()) contents.metadata[key] = value;
    }
    std::set<std::string> files;
    for (const auto& [name, file] : index.at("weight_map").items()) files.insert(file);
    for (const auto& file : files) contents.files.push_back(SafetensorsFile::open(path / file));
  } else {
    contents.files.push_back(SafetensorsFile::open(path));
    contents.metadata = contents.files[0].metadata();
  }
  for (const auto& file : contents.files) contents.tensors.merge(file.tensors());
  return Checkpoint(std::make_shared<const Contents>(std::move(contents)));
}

const std::filesystem::path& Checkpoint::path() const { return contents_->path; }
const std::map<std::string, std::string>& Checkpoint::metadata() const {
  return contents_->metadata;
}
const std::vector<SafetensorsFile>& Checkpoint::files() const { return contents_->files; }
const NamedTensors& Checkpoint::tensors() const { return contents_->tensors; }
const ConstTensorView& Checkpoint::tensor(std::string_view name) const {
  const auto found = contents_->tensors.find(std::string(name));
  require(found != contents_->tensors.end(), "{} has no tensor '{}'", path().string(), name);
  return found->second;
}

}  // namespace switchyard
