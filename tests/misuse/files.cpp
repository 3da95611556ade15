// SPDX-License-Identifier: Apache-2.0
// Files and checkpoints.
#include <array>
#include <filesystem>

#include "misuse/misuse.h"
#include "switchyard/checkpoint.h"
#include "switchyard/convert.h"
#include "switchyard/moe_layer.h"

namespace switchyard::misuse {
namespace {

// A folder with a checkpoint of one tensor and one block of two experts.
struct Saved {
  std::unique_ptr<Communicator> comm = connect();
  std::filesystem::path path = std::filesystem::temp_directory_path() /
                               ("misuse-" + std::to_string(::getpid()) + ".safetensors");
  MoeLayerOptions options{.hidden = 4, .intermediate = 3, .router = RouterOptions::mixtral(2, 1)};
  ExpertPlacement placement = ExpertPlacement::contiguous(2, 1);
  MoeParameters parameters{options, placement, 0};

  Saved() {
    save_checkpoint(*comm, path,
                    {.tensors = {{"w", floats({2, 3})}},
                     .blocks = {{"mlp.", parameters.weights(), placement, 0}}});
  }
  ~Saved() { std::filesystem::remove(path); }
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;
};

std::function<void()> saved(const std::function<void(Saved&)>& call) {
  return [call] {
    Saved one;
    call(one);
  };
}

using Convert = MoeWeights (*)(const NamedTensors&, std::string_view, const ExpertPlacement&, int,
                               const Device&);
void convert(Convert from, const NamedTensors& tensors, int rank) {
  (void)from(tensors, "mlp.", ExpertPlacement::contiguous(2, 1), rank, {});
}

}  // namespace

std::vector<Misuse> of_files() {
  return {
      {"SafetensorsFile::open(path)", Kind::empty, [] { (void)SafetensorsFile::open(""); }, ""},
      {"SafetensorsFile::open(path)", Kind::out_of_range,
       [] { (void)SafetensorsFile::open("/no/such/file"); }, "/no/such/file"},
      {"SafetensorsFile::info(string_view)", Kind::out_of_range,
       saved([](auto& one) { (void)SafetensorsFile::open(one.path).info("v"); }), "v"},
      {"SafetensorsFile::tensor(string_view)", Kind::empty,
       saved([](auto& one) { (void)SafetensorsFile::open(one.path).tensor(""); }), "no tensor"},
      {"Checkpoint::open(path)", Kind::empty, [] { (void)Checkpoint::open(""); }, ""},
      {"Checkpoint::open(path)", Kind::out_of_range,
       [] { (void)Checkpoint::open("/no/such/file"); }, "/no/such/file"},
      {"Checkpoint::tensor(string_view)", Kind::out_of_range,
       saved([](auto& one) { (void)Checkpoint::open(one.path).tensor("v"); }), "v"},
      {"Checkpoint::file_of(string_view)", Kind::empty,
       saved([](auto& one) { (void)Checkpoint::open(one.path).file_of(""); }), "no tensor"},

      {"load_tensor(Checkpoint, string_view, TensorView, Device)", Kind::shape,
       saved([](auto& one) {
         load_tensor(Checkpoint::open(one.path), "w", floats({3, 2}));
       }),
       "[3,2]"},
      {"load_tensor(Checkpoint, string_view, TensorView, Device)", Kind::dtype,
       saved([](auto& one) {
         load_tensor(Checkpoint::open(one.path), "w", ints({2, 3}));
       }),
       "i32"},
      {"load_tensor(Checkpoint, string_view, TensorView, Device)", Kind::device,
       saved([](auto& one) {
         Tensor into = floats({2, 3});
         load_tensor(Checkpoint::open(one.path), "w", on_a_gpu(into));
       }),
       "gpu memory"},
      {"load_tensor(Checkpoint, string_view, TensorView, Device)", Kind::empty,
       saved([](auto& one) { load_tensor(Checkpoint::open(one.path), "w", {}); }), "[0]"},
      {"load_block(Checkpoint, string_view, ExpertPlacement, int, MoeViews, Device)",
       Kind::out_of_range, saved([](auto& one) {
         load_block(Checkpoint::open(one.path), "mlp.", one.placement, 1, one.parameters.views());
       }),
       "rank (1)"},
      {"load_block(Checkpoint, string_view, ExpertPlacement, int, MoeViews, Device)", Kind::empty,
       saved(
           [](auto& one) { load_block(Checkpoint::open(one.path), "mlp.", one.placement, 0, {}); }),
       "0 experts to load into, but rank 0 owns 2"},
      {"load_block(Checkpoint, string_view, ExpertPlacement, int, MoeViews, Device)", Kind::shape,
       saved([](auto& one) {
         load_block(Checkpoint::open(one.path), "mlp.", ExpertPlacement::contiguous(3, 1), 0,
                    one.parameters.views());
       }),
       "3"},
      {"save_checkpoint(Communicator, path, CheckpointContents, CheckpointForm)", Kind::empty,
       saved([](auto& one) { save_checkpoint(*one.comm, "", {}); }), ""},
      {"save_checkpoint(Communicator, path, CheckpointContents, CheckpointForm)", Kind::null,
       saved([](auto& one) {
         save_checkpoint(*one.comm, one.path, {.tensors = {{"w", at_a_null_pointer({2})}}});
       }),
       "null pointer"},
      {"save_checkpoint(Communicator, path, CheckpointContents, CheckpointForm)",
       Kind::out_of_range, saved([](auto& one) {
         save_checkpoint(*one.comm, one.path,
                         {.blocks = {{"mlp.", one.parameters.weights(), one.placement, 4}}});
       }),
       "rank (4)"},
      {"save_checkpoint(Communicator, path, CheckpointContents, CheckpointForm)", Kind::device,
       saved([](auto& one) {
         Tensor w = floats({2});
         save_checkpoint(*one.comm, one.path, {.tensors = {{"w", on_a_gpu(w)}}});
       }),
       "gpu memory"},

      {"from_hugging_face(NamedTensors, string_view, ExpertPlacement, int, Device)", Kind::empty,
       [] { convert(&from_hugging_face, {}, 0); }, "mlp.gate.weight"},
      {"from_hugging_face(NamedTensors, string_view, ExpertPlacement, int, Device)",
       Kind::out_of_range,
       [] {
         convert(&from_hugging_face, {{"mlp.gate.weight", floats({2, 4})}}, 3);
       },
       "rank (3)"},
      {"from_hugging_face(NamedTensors, string_view, ExpertPlacement, int, Device)", Kind::shape,
       [] {
         convert(&from_hugging_face, {{"mlp.gate.weight", floats({2})}}, 0);
       },
       "[2]"},
      {"from_kempner_forge(NamedTensors, string_view, ExpertPlacement, int, Device)", Kind::empty,
       [] { convert(&from_kempner_forge, {}, 0); }, "mlp.router.gate.weight"},
      {"from_kempner_forge(NamedTensors, string_view, ExpertPlacement, int, Device)",
       Kind::out_of_range,
       [] {
         convert(&from_kempner_forge, {{"mlp.router.gate.weight", floats({2, 4})}}, -1);
       },
       "rank (-1)"},
  };
}

}  // namespace switchyard::misuse
