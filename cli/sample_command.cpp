// SPDX-License-Identifier: Apache-2.0
// switchyard sample: generates text from a checkpoint of switchyard train.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoints/checkpoints.h"
#include "comm_options.h"
#include "commands.h"
#include "common/printable.h"
#include "launch.h"
#include "model/transformer.h"
#include "options/options.h"
#include "run/resources.h"
#include "run/sampler.h"
#include "switchyard/agreement.h"
#include "switchyard/device.h"
#include "switchyard/mesh.h"

namespace switchyard::cli {
namespace {

struct SampleFlags {
  std::string path;
  std::optional<std::string> prompt;  // if not given, the prompt of the training run
  train::SampleOptions sample;
  LaunchOptions launch = {.ranks = 1};
  bool raw = false;
};

// Prints text while it grows: raw, or made safe for a terminal.
class TextOutput {
 public:
  explicit TextOutput(bool raw) : raw_(raw) {}

  void add(std::string_view text) {
    pending_ += text;
    // No byte of a multi-byte character is ASCII, so such bytes wait for the next ASCII one.
    const bool is_whole = !pending_.empty() && static_cast<unsigned char>(pending_.back()) < 0x80U;
    if (raw_ || is_whole) show();
  }
  void finish() {
    if (!raw_) pending_ += '\n';
    show();
  }

 private:
  void show() {
    const auto text = raw_ ? pending_ : train::printable_lines(pending_);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    pending_.clear();
  }

  bool raw_;
  std::string pending_;
};

std::string is_number(const std::string& text) {
  return std::isnan(std::strtod(text.c_str(), nullptr)) ? text + " is not a number" : "";
}

void sample_on_rank(Communicator& world, const SampleFlags& flags) {
  const auto header = train::read_header(world, flags.path);
  const train::MeshConfig mesh_config;  // all ranks along ep
  Mesh mesh(world, train::mesh_axes(mesh_config, world.size()));
  const auto device =
      Device::cpu({.num_threads = std::max(1, num_cores() / std::max(1, world.size()))});
  auto model_config = header.config.model;
  model_config.sizing = train::BufferSizing::exact;  // not sized by the file's context
  const auto prompt = flags.prompt.value_or(header.config.prompt);
  const auto text_bytes = static_cast<std::int64_t>(prompt.size()) + flags.sample.bytes;
  const int ranks_here = world.backend() == "threads" ? world.size() : 1;
  agree(world, [&] {
    train::require_memory(
        train::memory_of_sampling(model_config, {.ranks = world.size(), .ranks_here = ranks_here},
                                  std::min(text_bytes, model_config.context)),
        train::available_memory(), fmt::format("sampling from {}", header.path.string()));
  });
  train::Transformer model(model_config, mesh_config, mesh, device, header.config.seed);
  train::load_values(model, header);
  if (world.rank() != 0) {
    train::sample(model, prompt, flags.sample);
    return;
  }
  TextOutput output(flags.raw);
  output.add(prompt);
  auto options = flags.sample;
  options.on_byte = [&](char byte) { output.add({&byte, 1}); };
  train::sample(model, prompt, options);
  output.finish();
}

}  // namespace

void add_sample_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("sample", "Generate text from a checkpoint of switchyard train");
  const auto o = std::make_shared<SampleFlags>();
  command
      ->add_option("PATH", o->path,
                   "A checkpoint, such as step-00000400.safetensors, or a folder of checkpoints, "
                   "for its newest")
      ->required();
  command->add_option("--prompt", o->prompt, "Text to continue [the prompt of the training run]")
      ->type_name("TEXT");
  command->add_option("--bytes", o->sample.bytes, "Number of bytes to generate [400]")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->type_name("N");
  command
      ->add_option("--temperature", o->sample.temperature,
                   "Below 1, likely bytes are preferred; 0 always takes the likeliest [0.7]")
      ->check(CLI::Range(0.0, 1000.0))
      ->check(is_number)  // CLI::Range accepts NaN
      ->type_name("X");
  command->add_option("--seed", o->sample.seed, "Random seed [1]")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  command->add_flag("--raw", o->raw,
                    "Write the bytes unchanged; otherwise, control characters other than newline "
                    "and tab, and invalid UTF-8, become ?");
  auto* ranks =
      command
          ->add_option("--ranks", o->launch.ranks, "Number of ranks to divide the experts over [1]")
          ->check(CLI::Range(1, 1024))
          ->type_name("N");
  add_comm_options(command, o->launch);
  command->callback([o, ranks] {
    if (o->launch.comm != "threads" && ranks->count() == 0) o->launch.ranks = 0;
    launch(o->launch, [&](Communicator& world) { sample_on_rank(world, *o); });
  });
}

}  // namespace switchyard::cli
