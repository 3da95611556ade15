// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job that saves checkpoints of a small layer it has trained for a step, or of
// one that loads them on its own device and takes the next step. Every rank writes what it saw, as
// MpiJob says: "no error", or what differs.
//   moved_checkpoint DIR save|load DEVICE CHECKPOINTS
// Devices: cpu, cuda. CHECKPOINTS is a folder that exists.
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/layer/moe_tensors.h"
#include "support/mpi_rank.h"
#include "support/random.h"
#include "support/reference/cut.h"
#include "switchyard/switchyard.h"

namespace switchyard::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kNumExperts = 6;  // four ranks have unequal numbers of them
constexpr std::int64_t kNumTokens = 400;
constexpr std::array kDtypes{Dtype::f32, Dtype::bf16};
constexpr std::array kForms{CheckpointForm::one_file, CheckpointForm::file_per_rank};
const std::string kPrefix = "model.layers.0.mlp.";

MoeLayerOptions options_of(Dtype dtype) {
  MoeLayerOptions options{.hidden = 64,
                          .intermediate = 64,
                          .router = RouterOptions::mixtral(kNumExperts, 3),
                          .dtype = dtype,
                          .shared_intermediate = 64};
  options.router.score_bias = ScoreBias::choice;
  return options;
}

// In bf16 none, as a GPU's own kernels want it.
Biases biases_of(Dtype dtype) { return dtype == Dtype::f32 ? Biases::all : Biases::none; }

ExpertPlacement placement_of(const Communicator& comm) {
  return ExpertPlacement::contiguous(kNumExperts, comm.size());
}

fs::path path_of(const fs::path& checkpoints, Dtype dtype, CheckpointForm form) {
  const std::string name(name_of(dtype));
  return checkpoints / (name + (form == CheckpointForm::one_file ? ".safetensors" : ""));
}

// Tensors in the host's memory, by names that are the same on every rank.
using NamedViews = std::map<std::string, ConstTensorView>;

NamedViews experts_of(const MoeParameters& parameters, const Communicator& comm) {
  const MoeWeights weights = parameters.copy_on(Device()).weights();
  const auto placement = placement_of(comm);
  const auto ids = placement.experts_of(comm.rank());
  NamedViews result;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (const auto& [name, view] : named_tensors(weights.experts.at(i))) {
      result["expert " + std::to_string(ids[i]) + " " + name] = view;
    }
  }
  return result;
}

NamedViews tensors_of(const MoeParameters& parameters, const Communicator& comm) {
  const MoeWeights weights = parameters.copy_on(Device()).weights();
  NamedViews result = experts_of(parameters, comm);
  result["gate"] = weights.router.gate;
  result["gate_bias"] = weights.router.gate_bias;
  result["score_bias"] = weights.router.score_bias;
  for (const auto& [name, view] : named_tensors(weights.shared)) {
    result[std::string("shared expert ") + name] = view;
  }
  return result;
}

// Returns the differences between `actual`, which may be a part, and `expected`, one per line.
std::string differences(const std::string& what, const NamedViews& actual,
                        const NamedViews& expected) {
  std::string result;
  for (const auto& [name, view] : actual) {
    const auto same = same_bits(view, expected.at(name));
    if (same) continue;
    result.append(what).append(": ").append(name).append(": ").append(same.message()).append("\n");
  }
  return result;
}

// The results of a step on this rank, in the memory of the device.
struct Step {
  Tensor y, d_x;
  MoeParameters gradients;
};

// The same tokens at every number of ranks. Collective, on the device of the parameters.
Step train(Communicator& comm, Dtype dtype, const MoeParameters& parameters) {
  const Device& device = parameters.device();
  const auto options = options_of(dtype);
  Random random(7);
  const Tensor all_x = random.tensor({kNumTokens, options.hidden}, dtype);
  const Tensor all_d_y = random.tensor({kNumTokens, options.hidden}, dtype);
  const Piece piece = awkward_piece(comm, kNumTokens);
  const Tensor x = device.copy_of(piece.of(all_x));
  const Tensor d_y = device.copy_of(piece.of(all_d_y));

  const auto placement = placement_of(comm);
  MoeLayer layer(comm, placement, options, device);
  Step step{device.empty(x.shape(), dtype), device.empty(x.shape(), dtype),
            MoeParameters(options, placement, comm.rank(), biases_of(dtype), device)};
  SavedForBackward saved;
  layer.forward(parameters.weights(), {.x = x}, step.y, &saved);
  layer.backward(parameters.weights(), saved, d_y,
                 {.d_x = step.d_x, .gradients = step.gradients.views()});
  layer.check();
  device.synchronize();
  comm.barrier();  // the layer goes when no rank is in the step any more
  return step;
}

// weight −= gradient / 256, both in the host's memory.
void descend(const ConstTensorView& gradient, const TensorView& weight) {
  for (std::int64_t r = 0; r < weight.rows(); ++r) {
    const auto g = gradient.slice(r, r + 1);
    const auto w = weight.slice(r, r + 1);
    for (std::size_t i = 0; i < static_cast<std::size_t>(w.shape().num_elements()); ++i) {
      if (w.dtype() == Dtype::f32) {
        w.span<float>()[i] -= g.span<float>()[i] / 256.0F;
      } else {
        Bfloat16& value = w.span<Bfloat16>()[i];
        value = to_bfloat16(to_float(value) - to_float(g.span<Bfloat16>()[i]) / 256.0F);
      }
    }
  }
}

void descend(const ExpertWeights& gradients, const ExpertViews& weights) {
  const auto from = named_tensors(gradients);
  const auto to = named_tensors(weights);
  for (std::size_t i = 0; i < to.size(); ++i) descend(from[i].second, to[i].second);
}

// Random parameters and the gradients of one step of the device, in its memory.
MoeParameters trained(Communicator& comm, Dtype dtype, const Device& device) {
  const auto random = MoeParameters::random(options_of(dtype), placement_of(comm), comm.rank(), 5,
                                            biases_of(dtype), device);
  Step step = train(comm, dtype, random);
  Mesh mesh(comm, {{"ep", comm.size()}});
  reduce_gradients(step.gradients.views(), mesh, {}, device);
  const MoeWeights gradients = step.gradients.copy_on(Device()).weights();
  comm.barrier();  // the mesh goes when the sums are done everywhere

  MoeParameters parameters = random.copy_on(Device());
  const MoeViews& views = parameters.views();
  descend(gradients.router.gate, views.router.gate);
  descend(gradients.router.gate_bias, views.router.gate_bias);
  const auto score_bias = views.router.score_bias.span<float>();
  for (std::size_t e = 0; e < score_bias.size(); ++e) score_bias[e] = 0.1F * static_cast<float>(e);
  for (std::size_t i = 0; i < views.experts.size(); ++i) {
    descend(gradients.experts.at(i), views.experts[i]);
  }
  descend(gradients.shared, views.shared);
  return parameters.copy_on(device);
}

// The rank's part, in the device's memory.
MoeParameters loaded(const Checkpoint& checkpoint, Dtype dtype, const Communicator& comm,
                     const Device& device) {
  const auto placement = placement_of(comm);
  MoeParameters parameters(options_of(dtype), placement, comm.rank(), biases_of(dtype), device);
  load_block(checkpoint, kPrefix, placement, comm.rank(), parameters.views(), device);
  return parameters;
}

// Both return what differs. Here: what the files hold from what the device's memory holds.
std::string save(Communicator& comm, const Device& device, const fs::path& checkpoints) {
  std::string result;
  for (const Dtype dtype : kDtypes) {
    const auto parameters = trained(comm, dtype, device);
    for (const CheckpointForm form : kForms) {
      const auto path = path_of(checkpoints, dtype, form);
      save_checkpoint(comm, path,
                      {.blocks = {{kPrefix, parameters.weights(), placement_of(comm), comm.rank()}},
                       .device = device},
                      form);
      comm.barrier();
      const auto in_file = loaded(Checkpoint::open(path), dtype, comm, Device());
      result += differences("saved as " + path.filename().string(), tensors_of(in_file, comm),
                            tensors_of(parameters, comm));
    }
  }
  return result;
}

// Here: what the device's memory holds from what one rank on a CPU loads, and a step of all ranks
// from that of one rank on such a device.
std::string load(Communicator& comm, const Device& device, const fs::path& checkpoints) {
  std::string result;
  const auto alone = connect();
  for (const Dtype dtype : kDtypes) {
    for (const CheckpointForm form : kForms) {
      const auto path = path_of(checkpoints, dtype, form);
      const auto what = path.filename().string();
      const auto checkpoint = Checkpoint::open(path);
      const auto in_file = tensors_of(loaded(checkpoint, dtype, *alone, Device()), *alone);
      const auto whole = loaded(checkpoint, dtype, *alone, device);
      const auto part = loaded(checkpoint, dtype, comm, device);
      result += differences(what + " loaded by one rank", tensors_of(whole, *alone), in_file);
      result += differences(what + " loaded", tensors_of(part, comm), in_file);

      const Step one = train(*alone, dtype, whole);
      const Step many = train(comm, dtype, part);
      const Tensor y = device.to_host(one.y);
      const Tensor d_x = device.to_host(one.d_x);
      const Piece piece = awkward_piece(comm, kNumTokens);
      result += differences(what + ", the next step",
                            {{"y", device.to_host(many.y)}, {"d_x", device.to_host(many.d_x)}},
                            {{"y", piece.of(y)}, {"d_x", piece.of(d_x)}});
      result += differences(what + ", gradients of the next step", experts_of(many.gradients, comm),
                            experts_of(one.gradients, *alone));
    }
  }
  return result;
}

Device device_of(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return Device::cuda(cuda_options());
  throw std::invalid_argument("there is no device " + name);
}

std::string run(Communicator& comm, std::span<char*> arguments) {
  if (arguments.size() != 5) throw std::invalid_argument("DIR save|load DEVICE CHECKPOINTS");
  const std::string what = arguments[2];
  const Device device = device_of(arguments[3]);
  const fs::path checkpoints = arguments[4];
  if (what == "save") return save(comm, device, checkpoints);
  if (what == "load") return load(comm, device, checkpoints);
  throw std::invalid_argument("neither save nor load: " + what);
}

// Returns what differs, or "no error" once the rank has left the job as well.
std::string outcome_of(std::unique_ptr<Communicator> comm, std::span<char*> arguments) {
  try {
    auto outcome = run(*comm, arguments);
    if (!outcome.empty()) return outcome;
    comm.reset();
    return "no error";
  } catch (const std::exception& error) {
    if (comm) comm->abort(error.what());
    return std::string("error: ") + error.what();
  }
}

}  // namespace
}  // namespace switchyard::testing

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const std::filesystem::path folder = argv[1];
  auto comm = switchyard::connect({.backend = "mpi", .timeout = std::chrono::seconds(30)});
  const int rank = comm->rank();
  switchyard::testing::write_pid(folder, rank, ::getpid());
  const auto begin = Clock::now();
  const auto outcome =
      switchyard::testing::outcome_of(std::move(comm), {argv, static_cast<std::size_t>(argc)});
  const auto seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  switchyard::testing::write_outcome(folder, rank, outcome, seconds);
  return 0;
}
