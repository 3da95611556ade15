// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/history_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/error.h"

namespace switchyard::train {
namespace {

constexpr const char* kSteps = "history.steps";
constexpr const char* kHeldOut = "history.held_out";
constexpr const char* kLoads = "history.loads";
constexpr const char* kResumes = "history.resumes";  // only of resumed runs; never of version 0.1

using Numbers = std::vector<std::int64_t>;

struct Writer {
  Numbers& out;

  void operator()(std::int64_t value) const { out.push_back(value); }
  void operator()(double value) const { out.push_back(std::bit_cast<std::int64_t>(value)); }
  void operator()(float value) const { out.push_back(std::bit_cast<std::int32_t>(value)); }
};

struct Reader {
  std::span<const std::int64_t> in;
  std::size_t next = 0;

  void operator()(std::int64_t& value) { value = in[next++]; }
  void operator()(double& value) { value = std::bit_cast<double>(in[next++]); }
  void operator()(float& value) {
    value = std::bit_cast<float>(static_cast<std::int32_t>(in[next++]));
  }
};

// The order defines the checkpoint format: changing it changes the format.
template <typename Visit>
void visit_fields(StepRecord& r, Visit& visit) {
  visit(r.step);
  visit(r.loss);
  visit(r.balance_loss);
  visit(r.z_loss);
  visit(r.learning_rate);
  visit(r.gradient_norm);
  visit(r.seconds);
  visit(r.tokens_per_second);
  visit(r.balance);
  visit(r.gemm_share);
  visit(r.moe_seconds);
  visit(r.moe_gflops);
  visit(r.bytes_moved);
  visit(r.ran_again);
}

template <typename Visit>
void visit_fields(HeldOutRecord& r, Visit& visit) {
  visit(r.step);
  visit(r.loss);
}

template <typename Visit>
void visit_fields(ResumeRecord& r, Visit& visit) {
  visit(r.step);
  visit(r.time);
}

template <typename Visit>
void visit_fields(LoadRecord& r, Visit& visit) {
  visit(r.step);
  for (auto& layer : r.picks) {
    for (auto& picks : layer) visit(picks);
  }
}

// Returns a record with the sizes of this model, which every stored record has.
LoadRecord empty_load(const ModelConfig& config) {
  LoadRecord record;
  for (int layer = 0; layer < config.layers; ++layer) {
    if (!config.has_experts(layer)) continue;
    record.picks.emplace_back(static_cast<std::size_t>(config.experts));
  }
  return record;
}

template <typename Record>
Numbers numbers_of(Record record) {
  Numbers numbers;
  Writer writer{numbers};
  visit_fields(record, writer);
  return numbers;
}

template <typename Record>
Tensor to_tensor(const std::vector<Record>& records, const Record& empty) {
  const auto fields = static_cast<std::int64_t>(numbers_of(empty).size());
  Numbers all;
  for (const auto& record : records) {
    const auto numbers = numbers_of(record);
    all.insert(all.end(), numbers.begin(), numbers.end());
  }
  return Tensor::from<std::int64_t>({static_cast<std::int64_t>(records.size()), fields}, all);
}

template <typename Record>
std::vector<Record> records_from(const std::map<std::string, Tensor>& tensors, const char* name,
                                 const Record& empty) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw InvalidArgument(fmt::format("there is no tensor {}", name));
  const ConstTensorView tensor = found->second.view();
  const auto fields = static_cast<std::int64_t>(numbers_of(empty).size());
  const Shape expected{tensor.rows(), fields};
  if (tensor.dtype() != Dtype::i64 || tensor.shape() != expected) {
    throw InvalidArgument(fmt::format("{} is {} {}, but must be i64 {}", name,
                                      name_of(tensor.dtype()), tensor.shape().to_string(),
                                      expected.to_string()));
  }
  std::vector<Record> records(static_cast<std::size_t>(tensor.rows()), empty);
  Reader reader{tensor.span<std::int64_t>()};
  for (auto& record : records) visit_fields(record, reader);
  return records;
}

template <typename Record>
void require_order(const std::vector<Record>& records, const char* name, std::int64_t last_step) {
  std::int64_t before = 0;
  for (const auto& record : records) {
    if (record.step < before || record.step > last_step) {
      throw InvalidArgument(
          fmt::format("{} has a record of step {} after one of {}, in a run of "
                      "{} steps",
                      name, record.step, before, last_step));
    }
    before = record.step;
  }
}

}  // namespace

std::map<std::string, Tensor> to_tensors(const History& history, const ModelConfig& config) {
  std::map<std::string, Tensor> tensors;
  tensors.emplace(kSteps, to_tensor(history.steps, {}));
  tensors.emplace(kHeldOut, to_tensor(history.held_out, {}));
  tensors.emplace(kLoads, to_tensor(history.loads, empty_load(config)));
  if (!history.resumes.empty()) tensors.emplace(kResumes, to_tensor(history.resumes, {}));
  return tensors;
}

History history_from(const std::map<std::string, Tensor>& tensors, const ModelConfig& config) {
  History history{.steps = records_from<StepRecord>(tensors, kSteps, {}),
                  .held_out = records_from<HeldOutRecord>(tensors, kHeldOut, {}),
                  .loads = records_from(tensors, kLoads, empty_load(config)),
                  .resumes = {}};
  if (tensors.contains(kResumes)) {
    history.resumes = records_from<ResumeRecord>(tensors, kResumes, {});
  }
  return history;
}

void require_sound(const History& history, std::int64_t last_step) {
  require_order(history.steps, kSteps, last_step);
  require_order(history.held_out, kHeldOut, last_step);
  require_order(history.loads, kLoads, last_step);
  require_order(history.resumes, kResumes, last_step);
  for (const auto& record : history.steps) {
    if (0 <= record.ran_again && record.ran_again <= record.step) continue;
    throw InvalidArgument(fmt::format("{} says that {} of {} steps ran again", kSteps,
                                      record.ran_again, record.step));
  }
  for (const auto& record : history.loads) {
    for (const auto& layer : record.picks) {
      const auto least = std::ranges::min_element(layer);
      if (least == layer.end() || *least >= 0) continue;
      throw InvalidArgument(
          fmt::format("{} has {} picks of an expert at step {}", kLoads, *least, record.step));
    }
  }
}

}  // namespace switchyard::train
