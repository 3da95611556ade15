// switchyard inspect: flags and their checks.
#include <memory>

#include "commands.h"
#include "inspect/inspect.h"

namespace switchyard::cli {

void add_inspect_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "inspect", "What a checkpoint holds: files, tensors, MoE blocks, and what each rank reads");
  const auto o = std::make_shared<InspectOptions>();
  command
      ->add_option("PATH", o->path,
                   "A safetensors file, an index (*.safetensors.index.json), or a folder of either")
      ->required();
  command
      ->add_option("--ranks", o->num_ranks,
                   "Say which experts each of N ranks owns, consecutive ones, and what it reads")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_flag("--all", o->all, "List every tensor; otherwise layers and experts are folded");
  command->add_flag("--json", o->json,
                    "Print one JSON object a line: the checkpoint, files, tensors, blocks, ranks");
  command->callback([o] { inspect(*o); });
}

}  // namespace switchyard::cli
