// SPDX-License-Identifier: Apache-2.0
// Opens bytes as a checkpoint of switchyard train whose metadata has the right sum, and shows what
// it says of its run in a report.
#include <algorithm>
#include <map>
#include <string>

#include "checkpoints/checkpoint_header.h"
#include "checkpoints/history_tensors.h"
#include "fuzz_target.h"
#include "model/model_size.h"
#include "options/limits.h"
#include "options/options.h"
#include "report/report.h"
#include "run/resources.h"
#include "safetensors_mutator.h"
#include "switchyard/checkpoint.h"

namespace switchyard::train {
namespace {

// The sum behind its name, where there is room for one.
void set_sum(std::string& bytes, const std::string& sum) {
  const std::string name = "\"train.metadata_sum\":\"";
  const auto at = bytes.find(name);
  if (at == std::string::npos || bytes.size() < at + name.size() + sum.size()) return;
  bytes.replace(at + name.size(), sum.size(), sum);
}

History history_in(const CheckpointHeader& header) {
  std::map<std::string, Tensor> tensors;
  for (const auto& name : header.file->names("history.")) {
    const auto view = header.file->tensor(name);
    tensors.emplace(name, Tensor(view.shape(), view.dtype()));
    load_tensor(*header.file, name, tensors.at(name));
  }
  auto history = history_from(tensors, header.config.model);
  require_sound(history, header.progress.step);
  return history;
}

void read(const std::filesystem::path& path, std::size_t file_bytes) {
  auto header = read_header(path);
  constexpr std::size_t kLittle = 1 << 20;
  const auto needed = static_cast<std::size_t>(size_of(header.config.model).bytes);
  fuzz::check(needed <= std::max(kLittle, 2 * file_bytes + 1));
  fuzz::check(header.progress.step <= header.progress.position);
  fuzz::check(header.progress.position / kLongest <= kMostSteps);
  fit_mesh(header.config, 2);
  fuzz::check(memory_of_sampling(header.config.model, {}, 1).total() > 0);
  RunSummary summary;
  summary.history = history_in(header);
  summary.prompt = header.config.prompt;
  for (const auto& option : options_of(header.config)) {
    summary.configuration.emplace_back(option.name, option.get());
  }
  for (int layer = 0; layer < header.config.model.layers; ++layer) {
    if (header.config.model.has_experts(layer)) summary.moe_layers.push_back(layer);
  }
  fuzz::check(!report_html(summary).empty());
}

}  // namespace
}  // namespace switchyard::train

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace switchyard;
  static const fuzz::MemoryFile kFile;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  const auto write = [&] {
    kFile.write(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  };
  write();
  const auto file = fuzz::open<SafetensorsFile>(kFile.path());
  if (!file) return 0;
  train::set_sum(bytes, train::sum_of(file->metadata()));
  write();
  try {
    train::read(kFile.path(), size);
  } catch (const InvalidArgument&) {  // as it should be
  } catch (const Unsupported&) {
  }
  return 0;
}
