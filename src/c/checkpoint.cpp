// SPDX-License-Identifier: Apache-2.0
// C interface: checkpoints.
#include "switchyard/checkpoint.h"

#include <nlohmann/json.hpp>

#include "c/ranks.h"
#include "c/views.h"
#include "comm/agreement.h"
#include "core/require.h"

struct switchyard_checkpoint {
  switchyard::Checkpoint checkpoint;
  std::string contents;
};

namespace switchyard::c {
namespace {

nlohmann::json contents_of(const Checkpoint& checkpoint) {
  auto tensors = nlohmann::json::object();
  for (const auto& name : checkpoint.names()) {
    const SafetensorsFile& file = checkpoint.file_of(name);
    const TensorInfo info = file.info(name);
    tensors[name] = {{"dtype", info.dtype},
                     {"shape", info.shape},
                     {"bytes", info.bytes},
                     {"readable", info.is_readable},
                     {"file", file.path().filename().string()}};
  }
  return {{"metadata", checkpoint.metadata()}, {"tensors", tensors}};
}

CheckpointBlock block_of(const switchyard_checkpoint_block& block, const Device& device) {
  const switchyard_layer_weights& given = block.tensors;
  auto views = views_of(given,
                        {activation_for(given.gate_up, given.down),
                         activation_for(given.shared_gate_up, given.shared_down)},
                        device.memory());
  const auto placement = placement_of(block.placement);
  require(0 <= block.rank && block.rank < placement.num_ranks(), "rank ({}) must be 0 to {}",
          block.rank, placement.num_ranks() - 1);
  return {.prefix = std::string(text_of(block.prefix)),
          .tensors = MoeParameters::of(std::move(views), device).weights(),
          .placement = placement,
          .rank = static_cast<int>(block.rank)};
}

CheckpointContents contents_from(const switchyard_checkpoint_contents_form& form,
                                 const Device& device) {
  const auto require_list = [](const void* list, std::int64_t count, std::string_view name) {
    require(count >= 0, "there cannot be {} {}", count, name);
    require(list != nullptr || count == 0, "{} is a null pointer", name);
  };
  require_list(form.tensors, form.num_tensors, "tensors");
  require_list(form.blocks, form.num_blocks, "blocks");
  require_list(form.metadata, form.num_metadata, "metadata");
  CheckpointContents contents;
  contents.device = device;
  for (std::int64_t i = 0; i < form.num_tensors; ++i) {
    const std::string name(text_of(form.tensors[i].name));
    contents.tensors.emplace(name, tensor_of(form.tensors[i].tensor, device.memory(), name));
  }
  for (std::int64_t i = 0; i < form.num_blocks; ++i) {
    contents.blocks.push_back(block_of(form.blocks[i], device));
  }
  for (std::int64_t i = 0; i < form.num_metadata; ++i) {
    contents.metadata.emplace(text_of(form.metadata[2 * i]), text_of(form.metadata[2 * i + 1]));
  }
  return contents;
}

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::guarded;
using c::on_stream;

int switchyard_checkpoint_open(const char* path, switchyard_checkpoint** checkpoint) {
  return guarded([&] {
    c::at(checkpoint, "checkpoint");
    const auto opened = Checkpoint::open(std::filesystem::path(c::text_of(path)));
    auto contents = c::contents_of(opened).dump();
    *checkpoint = new switchyard_checkpoint{opened, std::move(contents)};
  });
}

void switchyard_checkpoint_free(switchyard_checkpoint* checkpoint) { delete checkpoint; }

int switchyard_checkpoint_contents(switchyard_checkpoint* checkpoint, const char** json) {
  return guarded([&] { c::at(json, "json") = c::at(checkpoint, "checkpoint").contents.c_str(); });
}

int switchyard_checkpoint_read(switchyard_checkpoint* checkpoint, const char* name, void* into,
                               int64_t bytes) {
  return guarded([&] {
    const std::string_view text = c::text_of(name);
    const Checkpoint& from = c::at(checkpoint, "checkpoint").checkpoint;
    const ConstTensorView view = from.tensor(text);
    require(view.bytes() == bytes, "{} has {} bytes, but there is room for {}", text, view.bytes(),
            bytes);
    require(into != nullptr || bytes == 0, "into is a null pointer");
    if (bytes == 0) return;
    // Reads the file instead of the view: a file that was truncated is then an error, not a SIGBUS.
    const Device host;
    load_tensor(from, text, c::view_of(into, view.dtype(), view.shape(), host, "into"), host);
  });
}

int switchyard_checkpoint_load_tensor(switchyard_checkpoint* checkpoint, switchyard_device* device,
                                      void* stream, const char* name,
                                      const switchyard_tensor* into) {
  return on_stream(device, stream, [&](const Device& on) {
    load_tensor(c::at(checkpoint, "checkpoint").checkpoint, c::text_of(name),
                c::tensor_of(c::at(into, "into"), on.memory(), "into"), on);
  });
}

int switchyard_checkpoint_load_block(switchyard_checkpoint* checkpoint, switchyard_device* device,
                                     void* stream, const char* prefix,
                                     const switchyard_placement* placement, int64_t rank,
                                     const switchyard_layer_weights* into) {
  return on_stream(device, stream, [&](const Device& on) {
    const auto where = c::placement_of(c::at(placement, "placement"));
    require(0 <= rank && rank < where.num_ranks(), "rank ({}) must be 0 to {}", rank,
            where.num_ranks() - 1);
    const auto views = c::views_of(c::at(into, "into"),
                                   {c::activation_for(into->gate_up, into->down),
                                    c::activation_for(into->shared_gate_up, into->shared_down)},
                                   on.memory());
    load_block(c::at(checkpoint, "checkpoint").checkpoint, c::text_of(prefix), where,
               static_cast<int>(rank), views, on);
  });
}

int switchyard_checkpoint_save(switchyard_comm* comm, switchyard_device* device, void* stream,
                               const char* path, const switchyard_checkpoint_contents_form* form) {
  return c::on_rank(comm, [&](Communicator& ranks) {
    CheckpointContents contents;
    or_abort({&ranks}, "save_checkpoint", [&] {
      const Device& on = comm->rank->device_like(c::at(device, "device"));
      if (on.memory() == Memory::gpu) on.set_stream({stream});
      contents = c::contents_from(c::at(form, "form"), on);
    });
    save_checkpoint(
        ranks, std::filesystem::path(c::text_of(path)), contents,
        form->file_per_rank != 0 ? CheckpointForm::file_per_rank : CheckpointForm::one_file);
  });
}
