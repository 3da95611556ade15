// SPDX-License-Identifier: Apache-2.0
// All options: their names, limits and meanings, and how each kind of value is parsed and printed.
#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <system_error>
#include <type_traits>

#include "options/limits.h"
#include "options/options.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

constexpr int kMostLayers = 1024;
constexpr int kMostExperts = 65536;
constexpr std::int64_t kWidest = 65536;
constexpr std::int64_t kWidestInside = 1 << 20;
constexpr float kHighestWeight = 1000.0F;
constexpr float kHighestRate = 10.0F;
constexpr float kLargestBeta = 0.9999F;

using Options = std::vector<Option>;

// Makes an option with name, type and help; the caller fills in the rest.
Option option(std::string name, std::string type, std::string help) {
  return {.name = std::move(name),
          .section = {},
          .type = std::move(type),
          .help = std::move(help),
          .set = {},
          .get = {}};
}

template <typename T>
struct Limits {
  T least;
  T most;
};

// Parses the whole text as a number. Throws InvalidArgument if it is none or exceeds the limits.
template <typename T>
T parse_number(const std::string& name, const std::string& text, Limits<T> limits) {
  T number{};
  const char* const end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, number);
  const bool is_number = error == std::errc() && next == end;
  if (is_number && number >= limits.least && number <= limits.most) return number;
  throw InvalidArgument(fmt::format("--{} \"{}\" is not a {} from {} to {}", name, text,
                                    std::is_integral_v<T> ? "whole number" : "number", limits.least,
                                    limits.most));
}

template <typename T>
Option number_option(std::string name, T& value, Limits<std::type_identity_t<T>> limits,
                     std::string help) {
  Option o = option(std::move(name), std::is_integral_v<T> ? "N" : "X", std::move(help));
  o.set = [&value, limits, name = o.name](const std::string& text) {
    value = parse_number<T>(name, text, limits);
  };
  o.get = [&value] { return fmt::to_string(value); };
  return o;
}

template <typename T>
Option choice_option(std::string name, T& value, std::vector<std::pair<std::string, T>> choices,
                     std::string help) {
  std::string names;
  for (const auto& choice : choices) names += (names.empty() ? "" : "|") + choice.first;
  Option o = option(std::move(name), names, std::move(help));
  o.set = [&value, choices, name = o.name, names](const std::string& text) {
    for (const auto& [known, meaning] : choices) {
      if (known != text) continue;
      value = meaning;
      return;
    }
    throw InvalidArgument(fmt::format("--{} \"{}\" is not one of {}", name, text, names));
  };
  o.get = [&value, choices] {
    for (const auto& [known, meaning] : choices) {
      if (meaning == value) return known;
    }
    return std::string();
  };
  return o;
}

// An empty path is written as `empty`. Empty text, e.g. of a variable that is not set, is an error.
Option path_option(std::string name, std::string& value, const std::string& empty,
                   std::string help) {
  Option o = option(std::move(name), "PATH", std::move(help));
  o.set = [&value, empty, name = o.name](const std::string& text) {
    if (text.empty()) {
      throw InvalidArgument(fmt::format("--{} \"\" is neither a path nor {}", name, empty));
    }
    value = text == empty ? "" : text;
  };
  o.get = [&value, empty] { return value.empty() ? empty : value; };
  return o;
}

Option text_option(std::string name, std::string& value, std::string help) {
  Option o = option(std::move(name), "TEXT", std::move(help));
  o.set = [&value](const std::string& text) { value = text; };
  o.get = [&value] { return value; };
  return o;
}

Options sizes_of(ModelConfig& m) {
  const std::vector<std::pair<std::string, bool>> yes_or_no{{"true", true}, {"false", false}};
  return {
      number_option("layers", m.layers, {1, kMostLayers}, "Number of transformer layers"),
      number_option("hidden", m.hidden, {1, kWidest}, "Hidden size"),
      number_option("heads", m.heads, {1, kWidest}, "Attention heads; hidden / heads must be even"),
      number_option("experts", m.experts, {1, kMostExperts}, "Experts per MoE layer"),
      number_option("top-k", m.top_k, {1, 1024}, "Experts that each token picks"),
      number_option("intermediate", m.intermediate, {1, kWidestInside},
                    "Intermediate size of an expert"),
      number_option("shared-intermediate", m.shared_intermediate, {0, kWidestInside},
                    "Intermediate size of the shared expert; 0: no shared expert"),
      number_option("moe-every", m.moe_every, {1, kMostLayers}, "Every N-th layer is an MoE layer"),
      number_option("dense-intermediate", m.dense_intermediate, {1, kWidestInside},
                    "Intermediate size of layers without experts"),
      choice_option("tied", m.tied, yes_or_no,
                    "Whether the output head shares the embedding's weights"),
      choice_option<Balance>(
          "balance", m.balance,
          {{"bias", Balance::bias}, {"loss", Balance::loss}, {"none", Balance::none}},
          "How to keep the experts evenly loaded: by a bias on the router's choice, by a loss, or "
          "not at all"),
  };
}

Options training_of(ModelConfig& m) {
  return {
      number_option("context", m.context, {1, kLongest}, "Sequence length in bytes"),
      number_option("balance-rate", m.balance_rate, {0.0F, kHighestWeight},
                    "Update rate of the bias of --balance bias"),
      number_option("balance-weight", m.balance_weight, {0.0F, kHighestWeight},
                    "Weight of the loss of --balance loss"),
      number_option("z-weight", m.z_weight, {0.0F, kHighestWeight},
                    "Weight of the router's z-loss; 0: none"),
      choice_option<BufferSizing>(
          "sizing", m.sizing, {{"exact", BufferSizing::exact}, {"bounded", BufferSizing::bounded}},
          "Buffers as large as each step needs (exact), or of a fixed size (bounded); a step that "
          "overflows bounded buffers is run again"),
  };
}

Options options_of(OptimizerConfig& o) {
  return {
      number_option("learning-rate", o.learning_rate, {0.0F, kHighestRate}, "Peak learning rate"),
      number_option("final-learning-rate", o.final_learning_rate, {0.0F, kHighestRate},
                    "Learning rate at the last step; at most --learning-rate"),
      number_option("warm-up", o.warm_up, {0, kMostSteps},
                    "Steps until the peak learning rate; at most --steps"),
      number_option("beta1", o.beta1, {0.0F, kLargestBeta},
                    "Adam's decay rate of the mean gradient"),
      number_option("beta2", o.beta2, {0.0F, kLargestBeta},
                    "Adam's decay rate of the mean squared gradient"),
      number_option("epsilon", o.epsilon, {1e-30F, 1.0F},
                    "Adam's epsilon, added to the denominator"),
      number_option("weight-decay", o.weight_decay, {0.0F, kHighestRate},
                    "Weight decay of matrices"),
      number_option("clip", o.clip, {0.0F, 1e9F},
                    "Largest norm of the gradient over all parameters; 0: no clipping"),
  };
}

Options options_of(MeshConfig& m) {
  return {
      number_option("ranks", m.ranks, {0, kMostRanks},
                    "Number of ranks; 0: 4, or with --comm mpi the number that mpirun started"),
      number_option("dp", m.dp, {1, kMostRanks},
                    "Data-parallel copies of the experts, each on its own ranks"),
      number_option("ep", m.ep, {0, kMostRanks},
                    "Ranks that experts are divided over; 0: all ranks / (dp · sp)"),
      number_option("sp", m.sp, {1, kMostRanks}, "Ranks that each sequence is divided over"),
      choice_option<std::vector<std::string>>(
          "expert-axes", m.expert_axes, {{"ep", {"ep"}}, {"ep+sp", {"ep", "sp"}}},
          "Whether experts are divided over the ranks of --sp, too"),
  };
}

Options data_of(TrainConfig& c) {
  return {
      path_option("corpus", c.data.corpus, "embedded",
                  "Text to train on, a file or a folder; embedded: the King James Bible"),
      number_option("batch", c.data.batch, {1, kLongest}, "Sequences per step, over all ranks"),
      number_option("held-out", c.data.held_out, {1, kLongest},
                    "Largest number of held-out sequences to evaluate"),
  };
}

Options run_of(TrainConfig& c) {
  return {
      number_option("steps", c.steps, {1, kMostSteps},
                    "Total number of steps, including those before --resume"),
      number_option("seed", c.seed, {0, std::numeric_limits<std::uint64_t>::max()},
                    "Seed for the weights, the order of the text and the sample"),
      number_option("threads", c.threads, {0, 1024}, "Threads per rank; 0: cores / ranks"),
      number_option("evaluate-every", c.evaluate_every, {0, kMostSteps},
                    "Steps between evaluations of held-out text; 0: only at the end"),
  };
}

Options files_of(TrainConfig& c) {
  return {
      path_option("save", c.save, "none",
                  "Folder for checkpoints, or none; a resumed run keeps saving to the folder it "
                  "was resumed from"),
      number_option("every", c.every, {1, kMostSteps}, "Steps between checkpoints"),
      number_option("keep", c.keep, {1, kMostSteps}, "Number of newest checkpoints to keep"),
      path_option("resume", c.resume, "none",
                  "Checkpoint to continue from, or a folder of checkpoints; options not given keep "
                  "their saved values, except --threads and --report; --ranks, --dp, --ep or --sp "
                  "make a new mesh"),
      path_option("report", c.report, "none",
                  "File for the report, by default in the current folder; none: no report"),
  };
}

Options sample_of(TrainConfig& c) {
  return {
      text_option("prompt", c.prompt, "Text that the sample at the end continues"),
      number_option("sample-bytes", c.sample_bytes, {0, kLongest},
                    "Bytes in the sample; 0: no sample"),
      number_option("temperature", c.temperature, {0.0F, 100.0F},
                    "Sampling temperature; 0: always the likeliest byte"),
  };
}

void append(Options& all, const std::string& section, Options options) {
  for (auto& option : options) {
    option.section = section;
    all.push_back(std::move(option));
  }
}

// Marks options that the tensors of a checkpoint depend on.
Options fixed(Options options) {
  for (auto& option : options) option.is_fixed = true;
  return options;
}

}  // namespace

Options options_of(TrainConfig& config) {
  Options all;
  append(all, "Model", fixed(sizes_of(config.model)));
  append(all, "Model", training_of(config.model));
  append(all, "Optimizer", options_of(config.optimizer));
  append(all, "Ranks", options_of(config.mesh));
  append(all, "Data", data_of(config));
  append(all, "Run", run_of(config));
  append(all, "Files", files_of(config));
  append(all, "Sample", sample_of(config));
  for (auto& option : all) option.is_fixed = option.is_fixed || option.name == "seed";
  return all;
}

}  // namespace switchyard::train
