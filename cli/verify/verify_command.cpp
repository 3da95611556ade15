// switchyard verify: flags and their checks.
#include <memory>

#include "commands.h"
#include "verify/verify.h"

namespace switchyard::cli {

void add_verify_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("verify", "Compute what other systems recorded again, and compare");
  const auto o = std::make_shared<VerifyOptions>();
  command->add_option("PATH", o->paths, "Recorded cases, or folders of them (*.safetensors)")
      ->required();
  auto* ranks =
      command
          ->add_option("--ranks", o->ranks, "Numbers of ranks for cases that are for any [1,2,4]")
          ->delimiter(',')
          ->allow_extra_args(false)
          ->check(CLI::Range(1, 1024))
          ->type_name("N,N,...");
  command->add_option("--comm", o->comm, "How ranks are connected [threads]")
      ->check(CLI::IsMember({"threads", "mpi"}));
  add_device_options(command, o->device,
                     "Where to compute; with cuda all ranks share one GPU [cpu]");
  command->add_flag("--json", o->json, "Print one JSON object a line, one a tensor of a case");
  command->callback([o, ranks] {
    if (o->comm != "threads" && ranks->count() > 0) {
      throw CLI::ValidationError("--ranks", "with --comm " + o->comm + " mpirun -n decides");
    }
    require_sound(o->device);
    if (o->comm != "threads" && o->device.kind == DeviceKind::cuda) {
      throw CLI::ValidationError("--device", "on a GPU ranks are threads: leave --comm away");
    }
    if (!verify(*o)) throw CLI::RuntimeError(1);
  });
}

}  // namespace switchyard::cli
