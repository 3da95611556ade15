// SPDX-License-Identifier: Apache-2.0
// Saves checkpoints: the ranks agree on who writes what and write at the same time, then rank 0
// moves the result into place.
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/checkpoint_plan.h"
#include "checkpoint/checkpoint_target.h"
#include "comm/agreement.h"
#include "core/require.h"
#include "io/file_writer.h"
#include "io/replacement.h"
#include "io/safetensors_header.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using Forms = std::map<std::string, TensorForm>;

constexpr std::string_view kSaveCheckpoint = "save_checkpoint";
constexpr const char* kIndexName = "model.safetensors.index.json";

// A part that this rank writes, at byte `first` of a tensor.
struct Piece {
  std::string name;
  std::int64_t first = 0;
  ConstTensorView values;
};

class Saver {
 public:
  Saver(Communicator& comm, const CheckpointContents& contents,
        const std::vector<CheckpointRecord>& records, CheckpointPlan plan)
      : comm_(comm),
        device_(contents.device),
        records_(records),
        plan_(std::move(plan)),
        path_(records.front().path) {
    add_whole_tensors(contents);
    add_experts(contents);
  }

  void save() {
    lay_out_files();
    try {
      form() == CheckpointForm::one_file ? save_one_file() : save_file_per_rank();
    } catch (const CommunicationError&) {
      throw;
    } catch (const Error&) {  // thrown on every rank; none returns before the temporary is gone
      replacement_.reset();
      comm_.barrier();
      throw;
    }
  }

 private:
  CheckpointForm form() const { return records_.front().form; }
  const std::string& token() const { return records_.front().token; }

  // Lays out the file that this rank writes to. Throws before anything is written.
  void lay_out_files() {
    const bool is_file = form() == CheckpointForm::one_file;
    auto metadata = is_file ? records_.front().metadata : std::map<std::string, std::string>();
    metadata.emplace("format", "pt");
    agree(comm_, kSaveCheckpoint, [&] {
      layout_ = lay_out(forms_of(is_file ? std::nullopt : std::optional(comm_.rank())), metadata);
    });
  }

  void save_one_file() {
    on_rank_0([&] {
      replacement_.emplace(path_, token(), is_of_checkpoints);
      const auto file = FileWriter::create(replacement_->temporary(), path_.string());
      file.reserve(layout_.bytes);
      file.write(std::as_bytes(std::span(layout_.head)), 0);
      if (pieces_.empty()) file.sync();
    });
    write_together([&] {
      if (pieces_.empty()) return;
      write_pieces(FileWriter::open(temporary_beside(path_, token()), path_.string()));
    });
    on_rank_0([&] { replacement_->commit(); });
  }

  void save_file_per_rank() {
    on_rank_0([&] {
      replacement_.emplace(path_, token(), is_of_checkpoints);
      const auto& folder = replacement_->temporary();
      const bool made = retried([&] { return ::mkdir(folder.c_str(), 0777); }) == 0;
      if (!made) throw_storage_error("create", path_.string());
    });
    const auto files = file_names();
    write_together([&] {
      const auto own = files.find(comm_.rank());
      if (own == files.end()) return;
      const auto file = create_in_folder(own->second);
      file.reserve(layout_.bytes);
      file.write(std::as_bytes(std::span(layout_.head)), 0);
      write_pieces(file);
    });
    on_rank_0([&] {
      const std::string index = index_of(files);
      const auto file = create_in_folder(kIndexName);
      file.write(std::as_bytes(std::span(index)), 0);
      file.sync();
      sync_folder(replacement_->temporary());
      replacement_->commit();
    });
  }

  void on_rank_0(const std::function<void()>& work) {
    write_together([&] {
      if (comm_.rank() == 0) work();
    });
  }

  // Turns whatever keeps a rank from writing its part, including a lack of memory, into a
  // StorageError.
  void write_together(const std::function<void()>& work) {
    agree(comm_, kSaveCheckpoint, [&] {
      try {
        work();
      } catch (const CommunicationError&) {
        throw;
      } catch (const std::exception& error) {
        throw StorageError(error.what());
      }
    });
  }

  void add_whole_tensors(const CheckpointContents& contents) {
    const auto add = [&](const std::string& name, const ConstTensorView& view) {
      if (plan_.tensors.at(name).rank == comm_.rank()) pieces_.push_back({name, 0, view});
    };
    for (const auto& [name, view] : contents.tensors) add(name, view);
    for (const auto& block : contents.blocks) {
      for (const auto& [name, view] : replicated_tensors(block.prefix, block.tensors)) {
        if (is_given(view)) add(name, view);
      }
    }
  }

  void add_experts(const CheckpointContents& contents) {
    const auto& record = records_[static_cast<std::size_t>(comm_.rank())];
    for (const auto& block : contents.blocks) {
      const auto& own = record.blocks.at(block.prefix);
      const auto& owners = plan_.owners.at(block.prefix);
      for (std::size_t i = 0; i < own.ids.size(); ++i) {
        if (owners[static_cast<std::size_t>(own.ids[i])] != comm_.rank()) continue;
        const auto tensors = tensors_of(block.tensors.experts[i]);
        for (std::size_t t = 0; t < kNumExpertTensors; ++t) {
          if (!own.forms[t]) continue;
          const auto place = place_of(block.prefix, own, own.ids[i], t, form());
          pieces_.push_back({place.name, place.first, tensors[t]});
        }
      }
    }
  }

  // Returns the forms of all tensors, or of those that one rank writes.
  Forms forms_of(std::optional<int> rank) const {
    Forms forms;
    for (const auto& [name, tensor] : plan_.tensors) {
      if (!rank || tensor.rank == *rank) forms.emplace(name, tensor.form);
    }
    return forms;
  }

  void write_pieces(const FileWriter& file) const {
    for (const auto& [name, first, values] : pieces_) {
      write(file, values, layout_.offsets.at(name) + first);
    }
    file.sync();
  }

  // Stages GPU tensors through the host, some rows at a time.
  void write(const FileWriter& file, const ConstTensorView& values, std::int64_t offset) const {
    if (values.memory() == Memory::host) return file.write(values, offset);
    constexpr std::int64_t kStagedBytes = std::int64_t{32} << 20;
    const auto row_bytes = std::max<std::int64_t>(1, values.row_bytes());
    const auto most = std::max<std::int64_t>(1, kStagedBytes / row_bytes);
    for (std::int64_t first = 0; first < values.rows(); first += most) {
      const auto end = std::min(values.rows(), first + most);
      file.write(device_.to_host(values.slice(first, end)), offset + first * row_bytes);
    }
  }

  FileWriter create_in_folder(const std::string& name) const {
    return FileWriter::create(temporary_beside(path_, token()) / name, (path_ / name).string());
  }

  // Returns the file names by rank. Ranks with nothing to write have no file, except rank 0, so
  // that there is always one.
  std::map<int, std::string> file_names() const {
    std::set<int> ranks{0};
    for (const auto& [name, tensor] : plan_.tensors) ranks.insert(tensor.rank);
    std::map<int, std::string> names;
    for (const int rank : ranks) {
      names[rank] = fmt::format("model-{:05}-of-{:05}.safetensors", names.size() + 1, ranks.size());
    }
    return names;
  }

  std::string index_of(const std::map<int, std::string>& files) const {
    nlohmann::json index{{"metadata", records_.front().metadata},
                         {"weight_map", nlohmann::json::object()}};
    auto& weight_map = index["weight_map"];
    std::int64_t total = 0;
    for (const auto& [name, tensor] : plan_.tensors) {
      weight_map[name] = files.at(tensor.rank);
      total += tensor.form.bytes();
    }
    index["metadata"]["total_size"] = total;
    return index.dump(2) + "\n";
  }

  Communicator& comm_;
  const Device& device_;
  const std::vector<CheckpointRecord>& records_;
  CheckpointPlan plan_;
  fs::path path_;
  std::vector<Piece> pieces_;
  SafetensorsLayout layout_;
  std::optional<Replacement> replacement_;  // on rank 0 only
};

}  // namespace

void save_checkpoint(Communicator& comm, const fs::path& path, const CheckpointContents& contents,
                     CheckpointForm form) {
  CheckpointRecord own;
  agree(comm, kSaveCheckpoint, [&] {
    own = record_of(path, contents, form);
    if (comm.rank() == 0) require_replaceable(own.path, form);
  });
  const auto records = gather_records(comm, own);
  CheckpointPlan plan;
  // Throws the same error on all ranks.
  check_arguments({}, kSaveCheckpoint, [&] { plan = plan_checkpoint(records); });
  Saver(comm, contents, records, std::move(plan)).save();
}

}  // namespace switchyard
