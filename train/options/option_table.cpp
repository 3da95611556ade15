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
      number_option("layers", m.layers, {1, kMostLayers}, "Layers of the model"),
      number_option("hidden", m.hidden, {1, kWidest}, "Size of a token's vector"),
      number_option("heads", m.heads, {1, kWidest}, "Heads of attention, of an even size each"),
      number_option("experts", m.experts, {1, kMostExperts}, "Experts of a layer"),
      number_option("top-k", m.top_k, {1, 1024}, "Experts that a token picks"),
      number_option("intermediate", m.intermediate, {1, kWidestInside}, "Inner size of an expert"),
      number_option("shared-intermediate", m.shared_intermediate, {0, kWidestInside},
                    "Inner size of the expert that all tokens use; 0: no such expert"),
      number_option("moe-every", m.moe_every, {1, kMostLayers},
                    "One of so many layers has experts"),
      number_option("dense-intermediate", m.dense_intermediate, {1, kWidestInside},
                    "Inner size of layers without experts"),
      choice_option("tied", m.tied, yes_or_no, "Whether the head shares the embedding's matrix"),
      choice_option<Balance>(
          "balance", m.balance,
          {{"bias", Balance::bias}, {"loss", Balance::loss}, {"none", Balance::none}},
          "What keeps experts evenly loaded: a bias of the choice, a loss, or nothing"),
  };
}

Options training_of(ModelConfig& m) {
  return {
      number_option("context", m.context, {1, kLongest}, "Bytes of a sequence"),
      number_option("balance-rate", m.balance_rate, {0.0F, kHighestWeight},
                    "How fast the bias of --balance bias moves"),
      number_option("balance-weight", m.balance_weight, {0.0F, kHighestWeight},
                    "Weight of the loss of --balance loss"),
      number_option("z-weight", m.z_weight, {0.0F, kHighestWeight},
                    "Weight of the router's z-loss; 0: none"),
      choice_option<BufferSizing>(
          "sizing", m.sizing, {{"exact", BufferSizing::exact}, {"bounded", BufferSizing::bounded}},
          "Buffers as large as each step needs, or of a fixed size; a step that overflows those is "
          "run again"),
  };
}

Options options_of(OptimizerConfig& o) {
  return {
      number_option("learning-rate", o.learning_rate, {0.0F, kHighestRate},
                    "Learning rate at its highest"),
      number_option("final-learning-rate", o.final_learning_rate, {0.0F, kHighestRate},
                    "Learning rate at the last step; at most --learning-rate"),
      number_option("warm-up", o.warm_up, {0, kMostSteps},
                    "Steps until the rate is at its highest; at most --steps"),
      number_option("beta1", o.beta1, {0.0F, kLargestBeta}, "Decay of the mean of gradients"),
      number_option("beta2", o.beta2, {0.0F, kLargestBeta}, "Decay of the mean of their squares"),
      number_option("epsilon", o.epsilon, {1e-30F, 1.0F},
                    "Added to the root of the mean of squares"),
      number_option("weight-decay", o.weight_decay, {0.0F, kHighestRate},
                    "Weight decay of matrices"),
      number_option("clip", o.clip, {0.0F, 1e9F},
                    "Norm that the gradient of all parameters is clipped to; 0: none"),
  };
}

Options options_of(MeshConfig& m) {
  return {
      number_option("ranks", m.ranks, {0, kMostRanks},
                    "Ranks; 0: 4, or with --comm mpi those of mpirun"),
      number_option("dp", m.dp, {1, kMostRanks}, "Copies of the experts, each on ranks of its own"),
      number_option("ep", m.ep, {0, kMostRanks},
                    "Ranks that experts are divided over; 0: what --dp and --sp leave"),
      number_option("sp", m.sp, {1, kMostRanks}, "Ranks that each sequence is cut over"),
      choice_option<std::vector<std::string>>(
          "expert-axes", m.expert_axes, {{"ep", {"ep"}}, {"ep+sp", {"ep", "sp"}}},
          "Whether experts are divided over the ranks of --sp, too"),
  };
}

Options data_of(TrainConfig& c) {
  return {
      path_option("corpus", c.data.corpus, "embedded",
                  "Text to train on, a file or a folder; embedded: the King James Bible"),
      number_option("batch", c.data.batch, {1, kLongest}, "Sequences of a step, over all ranks"),
      number_option("held-out", c.data.held_out, {1, kLongest},
                    "Sequences of held-out text that are evaluated, at most"),
  };
}

Options run_of(TrainConfig& c) {
  return {
      number_option("steps", c.steps, {1, kMostSteps}, "Steps, those before --resume included"),
      number_option("seed", c.seed, {0, std::numeric_limits<std::uint64_t>::max()},
                    "Seed of the weights, the order of the text and the sample"),
      number_option("threads", c.threads, {0, 1024}, "Threads of each rank; 0: cores / ranks"),
      number_option("evaluate-every", c.evaluate_every, {0, kMostSteps},
                    "Steps between evaluations of held-out text; 0: only at the end"),
  };
}

Options files_of(TrainConfig& c) {
  return {
      path_option(
          "save", c.save, "none",
          "Folder of checkpoints, or none; a run that saved goes on saving where it is resumed "
          "from"),
      number_option("every", c.every, {1, kMostSteps}, "Steps between checkpoints"),
      number_option("keep", c.keep, {1, kMostSteps}, "Checkpoints that stay, the newest"),
      path_option("resume", c.resume, "none",
                  "Checkpoint to go on from, or folder of them; what is not given stays as it was, "
                  "but --threads and --report; with --ranks, --dp, --ep or --sp the mesh is new"),
      path_option("report", c.report, "none",
                  "File of the report, by default in the current folder; none: no report"),
  };
}

Options sample_of(TrainConfig& c) {
  return {
      text_option("prompt", c.prompt, "What the sample at the end begins with"),
      number_option("sample-bytes", c.sample_bytes, {0, kLongest}, "Bytes of the sample; 0: none"),
      number_option("temperature", c.temperature, {0.0F, 100.0F},
                    "How freely the sample is drawn; 0: always the likeliest byte"),
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
