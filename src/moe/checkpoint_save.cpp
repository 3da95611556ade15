// Saves checkpoints: ranks agree on who writes what, write at the same time, and rank 0 puts the
// whole in its place.
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/file_writer.h"
#include "core/in_quotes.h"
#include "core/replacement.h"
#include "core/require.h"
#include "core/safetensors_header.h"
#include "moe/check_arguments.h"
#include "moe/check_tensors.h"
#include "moe/checkpoint_plan.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using Forms = std::map<std::string, TensorForm>;

constexpr std::string_view kOperation = "save_checkpoint";
constexpr const char* kIndexName = "model.safetensors.index.json";

// What one rank writes: bytes first … of a tensor.
struct Piece {
  std::string name;
  std::int64_t first = 0;
  ConstTensorView values;
};

class Saver {
 public:
  Saver(Communicator& comm, const CheckpointContents& contents,
        const std::vector<CheckpointRecord>& records)
      : comm_(comm),
        records_(records),
        plan_(plan_checkpoint(records)),
        path_(records.front().path) {
    add_whole_tensors(contents);
    add_experts(contents);
  }

  void save() {
    try {
      form() == CheckpointForm::one_file ? save_one_file() : save_file_per_rank();
    } catch (const StorageError&) {  // on every rank, and none shall see what is left of it
      replacement_.reset();
      comm_.barrier();
      throw;
    }
  }

 private:
  CheckpointForm form() const { return records_.front().form; }
  const std::string& token() const { return records_.front().token; }

  void save_one_file() {
    auto metadata = records_.front().metadata;
    metadata.emplace("format", "pt");
    const auto layout = lay_out(forms_of(std::nullopt), metadata);
    on_rank_0([&] {
      replacement_.emplace(path_, token());
      const auto file = FileWriter::create(replacement_->temporary(), path_.string());
      file.reserve(layout.bytes);
      file.write(std::as_bytes(std::span(layout.head)), 0);
      if (pieces_.empty()) file.sync();
    });
    together([&] {
      if (pieces_.empty()) return;
      write_pieces(FileWriter::open(temporary_beside(path_, token()), path_.string()), layout);
    });
    on_rank_0([&] { replace(); });
  }

  void save_file_per_rank() {
    on_rank_0([&] {
      replacement_.emplace(path_, token());
      const bool made = ::mkdir(replacement_->temporary().c_str(), 0777) == 0;
      if (!made) throw_storage_error("create", path_.string());
    });
    const auto files = file_names();
    together([&] {
      const auto own = files.find(comm_.rank());
      if (own == files.end()) return;
      const auto layout = lay_out(forms_of(comm_.rank()), {{"format", "pt"}});
      const auto file = create_in_folder(own->second);
      file.reserve(layout.bytes);
      file.write(std::as_bytes(std::span(layout.head)), 0);
      write_pieces(file, layout);
    });
    on_rank_0([&] {
      const std::string index = index_of(files);
      const auto file = create_in_folder(kIndexName);
      file.write(std::as_bytes(std::span(index)), 0);
      file.sync();
      sync_folder(replacement_->temporary());
      replace();
    });
  }

  // And removes what was there before.
  void replace() {
    replacement_->commit();
    replacement_.reset();
  }

  // Any error: the other ranks wait for this one.
  template <typename Work>
  void together(const Work& work) {
    succeed_together<std::exception, StorageError>(kOperation, comm_, work);
  }
  template <typename Work>
  void on_rank_0(const Work& work) {
    together([&] {
      if (comm_.rank() == 0) work();
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

  // All tensors, or those that one rank writes.
  Forms forms_of(std::optional<int> rank) const {
    Forms forms;
    for (const auto& [name, tensor] : plan_.tensors) {
      if (!rank || tensor.rank == *rank) forms.emplace(name, tensor.form);
    }
    return forms;
  }

  void write_pieces(const FileWriter& file, const SafetensorsLayout& layout) const {
    for (const auto& piece : pieces_) {
      file.write(piece.values, layout.offsets.at(piece.name) + piece.first);
    }
    file.sync();
  }

  FileWriter create_in_folder(const std::string& name) const {
    return FileWriter::create(temporary_beside(path_, token()) / name, (path_ / name).string());
  }

  // By rank. Those with nothing to write have no file; rank 0 has, so that there is one.
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
    nlohmann::ordered_json index{{"metadata", records_.front().metadata},
                                 {"weight_map", nlohmann::ordered_json::object()}};
    std::int64_t total = 0;
    for (const auto& [name, tensor] : plan_.tensors) {
      index["weight_map"][name] = files.at(tensor.rank);
      total += tensor.form.bytes();
    }
    index["metadata"]["total_size"] = total;
    return index.dump(2) + "\n";
  }

  Communicator& comm_;
  const std::vector<CheckpointRecord>& records_;
  CheckpointPlan plan_;
  fs::path path_;
  std::vector<Piece> pieces_;
  std::optional<Replacement> replacement_;  // rank 0's
};

bool is_of_checkpoints(const fs::directory_entry& entry) {
  const auto name = entry.path().filename().string();
  std::error_code ignored;
  return entry.is_regular_file(ignored) &&
         (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

// What is replaced is removed: a folder that holds anything else was not meant.
void require_replaceable(const fs::path& path, CheckpointForm form) {
  std::error_code error;
  const auto status = fs::status(path, error);
  const bool is_folder = fs::is_directory(status);
  if (!fs::exists(status)) return;
  require(is_folder == (form == CheckpointForm::file_per_rank),
          "{} is {}, but the checkpoint is to be {}", path.string(),
          is_folder ? "a folder" : "not a folder",
          is_folder ? "one file" : "a folder with a file a rank");
  if (!is_folder) return;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
    require(is_of_checkpoints(*at),
            "{} holds {}, which is not part of a checkpoint and would be lost; choose another "
            "folder",
            path.string(), in_quotes(at->path().filename().string()));
  }
}

}  // namespace

void save_checkpoint(Communicator& comm, const fs::path& path, const CheckpointContents& contents,
                     CheckpointForm form) {
  CheckpointRecord own;
  check_together(kOperation, comm, [&] {
    own = record_of(path, contents, form);
    if (comm.rank() == 0) require_replaceable(own.path, form);
  });
  const auto records = gather_records(comm, own);
  Saver(comm, contents, records).save();
}

}  // namespace switchyard
