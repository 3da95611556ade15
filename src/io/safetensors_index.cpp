// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_index.h"

#include <utility>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/json_reader.h"

namespace switchyard {
namespace {

constexpr std::string_view kMetadataKey = "metadata";
constexpr std::string_view kWeightMap = "weight_map";

// True for a plain file name, which cannot lead out of the folder.
bool is_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
}

class IndexReader : public JsonReader {
 public:
  explicit IndexReader(const std::string& file) : JsonReader(file, "the index") {}

  SafetensorsIndex take() {
    require(has_weight_map_, "{}: the index has no weight_map", file());
    return std::move(index_);
  }

  bool start_object(std::size_t /*elements*/) override {
    if (level_ == Level::file) return enter(Level::index);
    if (level_ != Level::index) return refuse("an object");
    return enter(section_ == kMetadataKey ? Level::metadata : Level::weight_map);
  }

  bool key(std::string& key) override {
    if (level_ == Level::index) {
      require(key == kMetadataKey || key == kWeightMap,
              "{}: the index has {}, but only metadata and weight_map are allowed", file(),
              in_quotes(key));
      bool& has = key == kMetadataKey ? has_metadata_ : has_weight_map_;
      require(!std::exchange(has, true), "{}: the index has {} twice", file(), key);
      section_ = std::move(key);
    } else {
      const bool is_new = level_ == Level::metadata ? !index_.metadata.contains(key)
                                                    : !index_.weight_map.contains(key);
      require(is_new, "{}: {} of the index has {} twice", file(), section_, in_quotes(key));
      name_ = std::move(key);
    }
    return true;
  }

  bool end_object() override { return enter(level_ == Level::index ? Level::file : Level::index); }

  bool string(std::string& value) override {
    if (level_ == Level::weight_map) {
      if (!is_file_name(value)) throw no_file_name(value);
      index_.weight_map.emplace(std::move(name_), std::move(value));
      return true;
    }
    return level_ == Level::metadata ? keep(std::move(value)) : refuse("a string");
  }

  bool number_unsigned(std::uint64_t value) override { return scalar(std::to_string(value)); }
  bool number_integer(std::int64_t value) override { return scalar(std::to_string(value)); }
  bool number_float(double /*value*/, const std::string& text) override { return scalar(text); }
  bool boolean(bool value) override { return scalar(value ? "true" : "false"); }
  bool null() override { return scalar("null"); }

 private:
  enum class Level : std::int8_t { file, index, metadata, weight_map };

  bool enter(Level level) {
    level_ = level;
    return true;
  }

  bool keep(std::string value) {
    index_.metadata.emplace(std::move(name_), std::move(value));
    return true;
  }

  bool scalar(const std::string& text) {
    return level_ == Level::metadata ? keep(text) : refuse(text);
  }

  std::string file_of_tensor() const {
    return fmt::format("the file of tensor {}", in_quotes(name_));
  }

  InvalidArgument no_file_name(const std::string& value) const {
    return refusal(file_of_tensor(), "the name of a file in the index's folder",
                   fmt::format("{}", in_quotes(value)));
  }

  [[noreturn]] bool refuse(const std::string& found) const override {
    switch (level_) {
      case Level::file:
        throw refusal("the index", "an object", found);
      case Level::index:
        throw refusal(section_ + " of the index", "an object", found);
      case Level::metadata:
        throw refusal(fmt::format("{} of metadata", in_quotes(name_)),
                      "a string, a number, a boolean or null", found);
      case Level::weight_map:
        break;
    }
    throw refusal(file_of_tensor(), "a string", found);
  }

  SafetensorsIndex index_;
  Level level_ = Level::file;
  bool has_metadata_ = false;
  bool has_weight_map_ = false;
  std::string section_;  // the key at Level::index
  std::string name_;     // the key one level below
};

}  // namespace

SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& file) {
  IndexReader reader(file);
  reader.read(text);
  return reader.take();
}

}  // namespace switchyard
