// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_header.h"

#include <utility>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/json_reader.h"

namespace switchyard {
namespace {

constexpr auto kMetadata = kSafetensorsMetadata;
constexpr std::size_t kMaxNumbers = 64;  // per array; frameworks allow no more extents

std::optional<Dtype> dtype_named(std::string_view name) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i32, Dtype::i64}) {
    if (name == safetensors_name(dtype)) return dtype;
  }
  return std::nullopt;
}

using Numbers = std::vector<std::int64_t>;

class HeaderReader : public JsonReader {
 public:
  explicit HeaderReader(const std::string& file) : JsonReader(file, "the header") {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t /*elements*/) override {
    if (level_ == Level::file) return enter(Level::header);
    if (level_ != Level::header) return refuse("an object");
    if (name_ == kMetadata) return enter(Level::metadata);
    fields_ = {};
    return enter(Level::tensor);
  }

  bool key(std::string& key) override {
    if (level_ == Level::header) {
      const bool is_new = key == kMetadata ? !std::exchange(has_metadata_, true)
                                           : header_.entries.try_emplace(key).second;
      require(is_new, "{}: the header has {} twice", file(), in_quotes(key));
      name_ = std::move(key);
    } else if (level_ == Level::metadata) {
      require(!header_.metadata.contains(key), "{}: {} has {} twice", file(), kMetadata,
              in_quotes(key));
      field_ = std::move(key);
    } else {
      const bool is_known = key == "dtype" || key == "shape" || key == "data_offsets";
      require(is_known, "{}: tensor {} has {}, but only dtype, shape and data_offsets are allowed",
              file(), in_quotes(name_), in_quotes(key));
      require(!is_given(key), "{}: tensor {} has {} twice", file(), in_quotes(name_), key);
      field_ = std::move(key);
    }
    return true;
  }

  bool end_object() override {
    if (level_ == Level::tensor) finish_tensor();
    return enter(level_ == Level::header ? Level::file : Level::header);
  }

  bool start_array(std::size_t /*elements*/) override {
    if (level_ != Level::tensor || field_ == "dtype") return refuse("an array");
    numbers().emplace();
    return enter(Level::numbers);
  }

  bool end_array() override { return enter(Level::tensor); }

  bool string(std::string& value) override {
    if (level_ == Level::metadata) {
      header_.metadata.emplace(std::move(field_), std::move(value));
      return true;
    }
    if (level_ != Level::tensor || field_ != "dtype") return refuse("a string");
    fields_.dtype = std::move(value);
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (level_ != Level::numbers || !std::in_range<std::int64_t>(value)) {
      return refuse(std::to_string(value));
    }
    require(numbers()->size() < kMaxNumbers, "{}: tensor {} has more than {} numbers in its {}",
            file(), in_quotes(name_), kMaxNumbers, field_);
    numbers()->push_back(static_cast<std::int64_t>(value));
    return true;
  }

 private:
  enum class Level : std::int8_t { file, header, metadata, tensor, numbers };

  struct Fields {
    std::optional<std::string> dtype;
    std::optional<Numbers> shape;
    std::optional<Numbers> data_offsets;
  };

  bool enter(Level level) {
    level_ = level;
    return true;
  }

  std::optional<Numbers>& numbers() {
    return field_ == "shape" ? fields_.shape : fields_.data_offsets;
  }

  bool is_given(std::string_view field) const {
    return field == "dtype"   ? fields_.dtype.has_value()
           : field == "shape" ? fields_.shape.has_value()
                              : fields_.data_offsets.has_value();
  }

  [[noreturn]] bool refuse(const std::string& found) const override {
    const auto owner = name_ == kMetadata ? name_ : fmt::format("tensor {}", in_quotes(name_));
    switch (level_) {
      case Level::file:
        throw refusal("the header", "an object", found);
      case Level::header:
        throw refusal(owner, "an object", found);
      case Level::metadata:
        throw refusal(fmt::format("{} of {}", in_quotes(field_), owner), "a string", found);
      case Level::tensor:
        throw refusal(fmt::format("{} of {}", field_, owner),
                      field_ == "dtype" ? "a string" : "an array", found);
      case Level::numbers:
        break;
    }
    throw refusal(fmt::format("{} of {}", field_, owner), "integers from 0 to 2^63 - 1", found);
  }

  void finish_tensor() {
    for (const auto* field : {"dtype", "shape", "data_offsets"}) {
      require(is_given(field), "{}: tensor {} has no {}", file(), in_quotes(name_), field);
    }
    const Numbers& offsets = *fields_.data_offsets;
    require(offsets.size() == 2, "{}: data_offsets of tensor {} must be [begin, end], not [{}]",
            file(), in_quotes(name_), fmt::join(offsets, ", "));
    SafetensorsEntry& entry = header_.entries.at(name_);
    entry.dtype = dtype_named(*fields_.dtype);
    entry.dtype_name = std::move(*fields_.dtype);
    entry.shape = std::move(*fields_.shape);
    entry.begin = offsets[0];
    entry.end = offsets[1];
  }

  SafetensorsHeader header_;
  Level level_ = Level::file;
  bool has_metadata_ = false;
  std::string name_;   // the key at Level::header
  std::string field_;  // the key one level below
  Fields fields_;
};

}  // namespace

std::string_view safetensors_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return "F32";
    case Dtype::bf16:
      return "BF16";
    case Dtype::f16:
      return "F16";
    case Dtype::i32:
      return "I32";
    case Dtype::i64:
      break;
  }
  return "I64";
}

SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file) {
  HeaderReader reader(file);
  reader.read(json);
  return reader.take();
}

}  // namespace switchyard
