// SPDX-License-Identifier: Apache-2.0
#include "run/summary.h"

#include <fmt/format.h>

#include "common/bounded_count.h"
#include "common/sum_over_ranks.h"
#include "model/model_size.h"
#include "options/options.h"
#include "run/origin.h"

namespace switchyard::train {

std::string describe(const Mesh& mesh) {
  const int ranks = mesh.world().size();
  std::string text =
      fmt::format("{} rank{} ({})", ranks, ranks == 1 ? "" : "s", mesh.world().backend());
  const char* separator = ": ";
  for (const MeshAxis& axis : mesh.axes()) {
    text += fmt::format("{}{} {}", separator, axis.name, axis.size);
    separator = " x ";
  }
  return text;
}

RunSummary summarise(Trainer& trainer, double seconds) {
  RunSummary summary;
  Transformer& model = trainer.model();
  TrainConfig config = trainer.config();
  summary.title = describe(trainer.mesh());
  config.mesh.ep = trainer.mesh().size("ep");  // replaces 0, which means automatic
  for (const Option& option : options_of(config)) {
    summary.configuration.emplace_back(option.name, option.get());
  }
  for (int layer = 0; layer < config.model.layers; ++layer) {
    if (config.model.has_experts(layer)) summary.moe_layers.push_back(layer);
  }
  summary.history = trainer.history();
  summary.planned_steps = config.steps;
  summary.measured_steps = trainer.steps_made();
  summary.seconds = seconds;
  summary.tokens = (BoundedCount(trainer.progress().position) * config.model.context).value();
  const ModelSize size = size_of(config.model);
  summary.parameters = size.parameters;
  summary.active_parameters = size.active_parameters;
  std::vector<double> own;
  for (const StageTime& stage : model.times().stages()) own.push_back(stage.seconds);
  const auto sums = sum_over_ranks(trainer.mesh().world(), own);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    summary.stages.push_back(
        {model.times().stages()[i].name, sums[i] / trainer.mesh().world().size()});
  }
  summary.bytes = {{"tokens of MoE layers", trainer.bytes().tokens},
                   {"gradients", trainer.bytes().gradients},
                   {"keys and values", trainer.bytes().sequences}};
  summary.ranks = gather_use(model);
  return summary;
}

}  // namespace switchyard::train
