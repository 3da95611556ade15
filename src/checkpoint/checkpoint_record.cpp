// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/gather_strings.h"
#include "core/check_memory.h"
#include "core/in_quotes.h"
#include "core/require.h"
#include "io/replacement.h"
#include "io/safetensors_header.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

using Json = nlohmann::json;

// Returns the shape that a tensor of an expert must have.
Shape expected_shape(std::size_t tensor, std::int64_t hidden, std::int64_t intermediate) {
  switch (tensor) {
    case kGate:
    case kUp:
      return {intermediate, hidden};
    case kDown:
      return {hidden, intermediate};
    case kDownBias:
      return {hidden};
    default:
      return {intermediate};
  }
}

ExpertForms checked_forms(const ExpertWeights& expert, const std::string& stem, std::int64_t hidden,
                          Memory memory) {
  const auto tensors = tensors_of(expert);
  const auto name = [&](std::size_t t) { return stem + std::string(kExpertTensorNames[t]); };
  const auto& up = expert.up.shape();
  require(is_given(expert.up) && up.rank() == 2, "{} is {}, but must have 2 extents", name(kUp),
          up);
  ExpertForms forms;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (!is_given(tensors[t]) && t != kDown) continue;
    require_matrix(tensors[t], expected_shape(t, hidden, up[0]), name(t));
    require_reached(tensors[t], memory, name(t));
    forms[t] = form_of(tensors[t]);
  }
  require(forms[kGateBias].has_value() == (forms[kGate] && forms[kUpBias]),
          "{}: gate and up must both have a bias, or neither", stem);
  for (const auto& [gate, other] : {std::pair(kGate, kUp), std::pair(kGateBias, kUpBias)}) {
    require(!forms[gate] || forms[gate] == forms[other], "{} is {}, but {} is {}", name(gate),
            words_for(forms[gate]), name(other), words_for(forms[other]));
  }
  return forms;
}

void require_alike(const ExpertForms& forms, const ExpertForms& first, const std::string& stem) {
  for (std::size_t t = 0; t < kNumExpertTensors; ++t) {
    require(forms[t] == first[t], "{}{} is {}, but that of the rank's first expert is {}", stem,
            kExpertTensorNames[t], words_for(forms[t]), words_for(first[t]));
  }
}

void check_router(const RouterWeights& router, const std::string& prefix, std::int64_t num_experts,
                  Memory memory) {
  const auto& gate = router.gate.shape();
  require(is_given(router.gate) && gate.rank() == 2, "{}gate.weight is {}, but must have 2 extents",
          prefix, gate);
  require_matrix(router.gate, {num_experts, gate[1]}, prefix + "gate.weight");
  require_reached(router.gate, memory, prefix + "gate.weight");
  const auto check_bias = [&](const ConstTensorView& bias, std::string_view name) {
    if (!is_given(bias)) return;
    require_matrix(bias, {num_experts}, prefix + std::string(name));
    require_reached(bias, memory, prefix + std::string(name));
  };
  check_bias(router.gate_bias, "gate.bias");
  check_bias(router.score_bias, "gate.e_score_correction_bias");
}

BlockRecord record_of(const CheckpointBlock& block, Memory memory) {
  const auto& [prefix, tensors, placement, rank] = block;
  require(0 <= rank && rank < placement.num_ranks(), "block {}: rank ({}) must be 0 to {}",
          in_quotes(prefix), rank, placement.num_ranks() - 1);
  const auto ids = placement.experts_of(rank);
  require(tensors.experts.size() == ids.size(),
          "block {} has {} experts, but rank {} of its placement owns {}", in_quotes(prefix),
          tensors.experts.size(), rank, ids.size());
  check_router(tensors.router, prefix, placement.num_experts(), memory);
  const auto hidden = tensors.router.gate.shape()[1];
  BlockRecord record{placement.num_experts(), {ids.begin(), ids.end()}, {}};
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto stem = expert_stem(prefix, ids[i]);
    const auto forms = checked_forms(tensors.experts[i], stem, hidden, memory);
    if (i == 0) record.forms = forms;
    require_alike(forms, record.forms, stem);
  }
  const auto shared = tensors_of(tensors.shared);
  if (std::ranges::any_of(shared, [](const auto& view) { return is_given(view); })) {
    checked_forms(tensors.shared, prefix + "shared_experts.", hidden, memory);
  }
  return record;
}

void add_tensor(CheckpointRecord& record, const std::string& name, const ConstTensorView& view,
                Memory memory) {
  require_tensor_name(name);
  require_reached(view, memory, fmt::format("tensor {}", in_quotes(name)));
  const bool is_new = record.tensors.emplace(name, form_of(view)).second;
  require(is_new, "tensor {} is given twice", in_quotes(name));
}

Json to_json(const std::optional<TensorForm>& form) {
  if (!form) return nullptr;
  Json json{static_cast<int>(form->dtype)};
  for (int i = 0; i < form->shape.rank(); ++i) json.push_back(form->shape[i]);
  return json;
}

std::optional<TensorForm> form_from(const Json& json) {
  if (json.is_null()) return std::nullopt;
  const auto numbers = json.get<std::vector<std::int64_t>>();
  return TensorForm{static_cast<Dtype>(numbers[0]), Shape(std::span(numbers).subspan(1))};
}

std::string to_bytes(const CheckpointRecord& record) {
  Json json{{"path", record.path},          {"form", static_cast<int>(record.form)},
            {"token", record.token},        {"metadata", record.metadata},
            {"tensors", Json::object()},    {"blocks", Json::object()},
            {"of_blocks", record.of_blocks}};
  for (const auto& [name, form] : record.tensors) json["tensors"][name] = to_json(form);
  for (const auto& [prefix, block] : record.blocks) {
    Json forms = Json::array();
    for (const auto& form : block.forms) forms.push_back(to_json(form));
    json["blocks"][prefix] = {block.num_experts, block.ids, forms};
  }
  std::string bytes;
  Json::to_cbor(json, bytes);  // binary, since a path need not be UTF-8
  return bytes;
}

CheckpointRecord from_bytes(const std::string& bytes) {
  const Json json = Json::from_cbor(bytes);
  CheckpointRecord record{json.at("path"),
                          static_cast<CheckpointForm>(json.at("form").get<int>()),
                          json.at("token"),
                          json.at("metadata"),
                          {},
                          {},
                          json.at("of_blocks")};
  for (const auto& [name, form] : json.at("tensors").items()) {
    record.tensors[name] = *form_from(form);
  }
  for (const auto& [prefix, block] : json.at("blocks").items()) {
    BlockRecord& target = record.blocks[prefix];
    target.num_experts = block[0];
    target.ids = block[1].get<std::vector<std::int32_t>>();
    std::ranges::transform(block[2], target.forms.begin(), form_from);
  }
  return record;
}

}  // namespace

std::string words_for(const std::optional<TensorForm>& form) {
  return form ? form->to_string() : "missing";
}

CheckpointRecord record_of(const std::filesystem::path& path, const CheckpointContents& contents,
                           CheckpointForm form) {
  const auto named = path.has_filename() ? path : path.parent_path();
  const auto name = named.filename().string();
  require(!name.empty() && name != "." && name != "..",
          "path '{}' must end in the name of a file or folder", path.string());
  const auto whole_path = std::filesystem::absolute(named).string();
  CheckpointRecord record{whole_path, form, random_token(), contents.metadata, {}, {}, {}};
  require_metadata(contents.metadata);
  require(form == CheckpointForm::one_file || !contents.metadata.contains("total_size"),
          "the metadata must not have a 'total_size': the index writes its own");
  const Memory memory = contents.device.memory();
  for (const auto& [tensor, view] : contents.tensors) add_tensor(record, tensor, view, memory);
  for (const auto& block : contents.blocks) {
    const bool is_new = record.blocks.emplace(block.prefix, record_of(block, memory)).second;
    require(is_new, "block {} is given twice", in_quotes(block.prefix));
    for (const auto& [tensor, view] : replicated_tensors(block.prefix, block.tensors)) {
      if (!is_given(view)) continue;
      add_tensor(record, tensor, view, memory);
      record.of_blocks.insert(tensor);
    }
  }
  return record;
}

std::vector<CheckpointRecord> gather_records(Communicator& comm, const CheckpointRecord& own) {
  std::vector<CheckpointRecord> records;
  for (const auto& bytes : gather_strings(comm, to_bytes(own))) {
    records.push_back(from_bytes(bytes));
  }
  return records;
}

}  // namespace switchyard
