// SPDX-License-Identifier: Apache-2.0
// switchyard bench checkpoint.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/timing.h"
#include "progress.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kHidden = 1024;
constexpr int kFewestExperts = 16;
constexpr const char* kPrefix = "mlp.";

// A range of bytes in a file, and the memory it is read into.
struct FileRange {
  std::int64_t offset = 0;
  std::byte* into = nullptr;
  std::int64_t bytes = 0;
};

// Reads a file with plain reads, which loading is measured against.
class PlainReader {
 public:
  explicit PlainReader(const fs::path& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw InternalError(fmt::format("cannot open {}", path.string()));
  }
  ~PlainReader() { ::close(descriptor_); }
  PlainReader(const PlainReader&) = delete;
  PlainReader& operator=(const PlainReader&) = delete;

  void read(const FileRange& range) const {
    constexpr std::int64_t kPiece = 1 << 20;
    for (std::int64_t done = 0; done < range.bytes;) {
      const auto count = static_cast<std::size_t>(std::min(kPiece, range.bytes - done));
      const auto got = ::pread(descriptor_, range.into + done, count, range.offset + done);
      if (got <= 0) throw InternalError("a read that measures the ceiling failed");
      done += got;
    }
  }

 private:
  int descriptor_;
};

// Options for a layer with at least one expert per rank, whose experts have about `size` bytes in
// total.
MoeLayerOptions layer_of(std::uint64_t size, int num_ranks) {
  const int num_experts = std::max(kFewestExperts, num_ranks);
  const auto row = 3 * kHidden * size_of(Dtype::f32) * num_experts;
  const auto inner = std::max<std::int64_t>(1, static_cast<std::int64_t>(size) / row);
  return {
      .hidden = kHidden, .intermediate = inner, .router = {.num_experts = num_experts, .top_k = 1}};
}

// Maps the bytes of this rank's experts in the file to the rank's memory for them.
std::vector<FileRange> ranges_of(const Checkpoint& checkpoint, const ExpertPlacement& placement,
                                 int rank, const MoeViews& memory) {
  std::int64_t data_bytes = 0;
  const std::byte* data = nullptr;
  for (const auto& [name, view] : checkpoint.tensors()) {
    data_bytes += view.bytes();
    if (data == nullptr || std::less<>()(view.data(), data)) data = view.data();
  }
  const auto begin = static_cast<std::int64_t>(fs::file_size(checkpoint.path())) - data_bytes;
  const auto found = from_hugging_face(checkpoint.tensors(), kPrefix, placement, rank);
  std::vector<FileRange> ranges;
  for (std::size_t i = 0; i < found.experts.size(); ++i) {
    const auto add = [&](const ConstTensorView& from, const TensorView& into) {
      ranges.push_back({begin + (from.data() - data), into.data(), from.bytes()});
    };
    add(found.experts[i].gate, memory.experts[i].gate);
    add(found.experts[i].up, memory.experts[i].up);
    add(found.experts[i].down, memory.experts[i].down);
  }
  return ranges;
}

std::uint64_t checksum_of(std::span<const FileRange> ranges) {
  std::uint64_t sum = 0;
  for (const auto& range : ranges) {
    for (std::int64_t i = 0; i + 8 <= range.bytes; i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, range.into + i, sizeof(word));
      sum = sum * 31 + word;
    }
  }
  return sum;
}

struct CheckpointTimes {
  std::vector<std::int64_t> bytes_by_rank;  // expert bytes that each rank reads
  std::int64_t expert_bytes = 0;            // expert bytes in the file
  double save_seconds = 1e30;
  double load_seconds = 1e30;
  double ceiling_seconds = 1e30;

  std::int64_t bytes_read() const {
    return std::accumulate(bytes_by_rank.begin(), bytes_by_rank.end(), std::int64_t{0});
  }
};

class CheckpointBench {
 public:
  CheckpointBench(Communicator& comm, const BenchCheckpointOptions& options)
      : comm_(comm),
        options_(options),
        layer_(layer_of(options.size, comm.size())),
        placement_(ExpertPlacement::contiguous(layer_.router.num_experts, comm.size())),
        parameters_(MoeParameters::random(layer_, placement_, comm.rank(), 1)) {}

  CheckpointTimes run(const fs::path& path) {
    CheckpointTimes m;
    show_progress(comm_, "saving …");
    const CheckpointContents contents{
        .blocks = {{kPrefix, parameters_.weights(), placement_, comm_.rank()}}};
    m.save_seconds = timed(comm_, [&] { save_checkpoint(comm_, path, contents); });

    const auto ranges =
        ranges_of(Checkpoint::open(path), placement_, comm_.rank(), parameters_.views());
    m.bytes_by_rank = gather_bytes(ranges);
    m.expert_bytes = std::int64_t{3} * layer_.router.num_experts * kHidden * layer_.intermediate *
                     size_of(Dtype::f32);
    const auto saved = checksum_of(ranges);
    const PlainReader file(path);
    for (int i = 0; i < options_.repeat; ++i) {
      show_progress(comm_, fmt::format("round {} of {} …", i + 1, options_.repeat));
      if (i == 0) parameters_.set_zero();
      m.load_seconds = std::min(m.load_seconds, timed(comm_, [&] { load(path); }));
      if (i == 0 && checksum_of(ranges) != saved) {
        throw InternalError("the loaded bytes differ from the saved ones");
      }
      m.ceiling_seconds = std::min(m.ceiling_seconds, timed(comm_, [&] {
                                     for (const auto& range : ranges) file.read(range);
                                   }));
    }
    show_progress(comm_, "");
    return m;
  }

  const MoeLayerOptions& layer() const { return layer_; }

 private:
  // Opens the file again, as a job that starts would.
  void load(const fs::path& path) {
    load_block(Checkpoint::open(path), kPrefix, placement_, comm_.rank(), parameters_.views());
  }

  std::vector<std::int64_t> gather_bytes(std::span<const FileRange> ranges) {
    Tensor own = Tensor::zeros({1}, Dtype::i64);
    for (const auto& range : ranges) own.span<std::int64_t>()[0] += range.bytes;
    Tensor all({comm_.size()}, Dtype::i64);
    comm_.all_gather(own, all);
    return {all.span<std::int64_t>().begin(), all.span<std::int64_t>().end()};
  }

  Communicator& comm_;
  const BenchCheckpointOptions& options_;
  MoeLayerOptions layer_;
  ExpertPlacement placement_;
  MoeParameters parameters_;
};

void print_json(const CheckpointTimes& m) {
  const nlohmann::ordered_json line = {
      {"op", "checkpoint"},
      {"ranks", m.bytes_by_rank.size()},
      {"expert_bytes", m.expert_bytes},
      {"bytes_by_rank", m.bytes_by_rank},
      {"each_byte_once", m.bytes_read() == m.expert_bytes},
      {"save_gb_per_s", gigabytes_per_second(m.expert_bytes, m.save_seconds)},
      {"load_gb_per_s", gigabytes_per_second(m.bytes_read(), m.load_seconds)},
      {"ceiling_gb_per_s", gigabytes_per_second(m.bytes_read(), m.ceiling_seconds)},
      {"fraction_of_ceiling", m.ceiling_seconds / m.load_seconds}};
  fmt::print("{}\n", line.dump());
}

void print_table(const CheckpointTimes& m, const CheckpointBench& bench, const Communicator& comm,
                 int repeat) {
  const auto& layer = bench.layer();
  fmt::print("{} experts of {} x {} f32, {} bytes; {} ranks over {}\n\n", layer.router.num_experts,
             layer.hidden, layer.intermediate, m.expert_bytes, comm.size(), comm.backend());
  fmt::print("bytes read by rank: {}\n", fmt::join(m.bytes_by_rank, ", "));
  fmt::print("together {}: {}\n\n", m.bytes_read(),
             m.bytes_read() == m.expert_bytes ? "each byte of the experts once"
                                              : "NOT equal to the bytes of the experts");
  const auto line = [&](const char* what, double seconds) {
    fmt::print("{:<10} {:>10.1f} ms {:>8.2f} GB/s\n", what, seconds * 1e3,
               gigabytes_per_second(m.expert_bytes, seconds));
  };
  line("save", m.save_seconds);
  line("load", m.load_seconds);
  line("ceiling", m.ceiling_seconds);
  fmt::print(
      "\nLoading reaches {:.0f}% of the ceiling: plain reads of the same bytes from the cached "
      "file,\nby as many ranks into the same memory. Best of {} rounds. Saving includes writing to "
      "the disk.\n",
      m.ceiling_seconds / m.load_seconds * 100.0, repeat);
}

// A file with a name that all ranks get from rank 0. The destructor removes it.
class BenchFile {
 public:
  BenchFile(Communicator& comm, const fs::path& folder) : is_first_(comm.rank() == 0) {
    Tensor number = Tensor::from<std::int64_t>({1}, {::getpid()});
    comm.broadcast(number, 0);
    path_ = (folder.empty() ? fs::temp_directory_path() : folder) /
            fmt::format("switchyard-bench-{}.safetensors", number.span<std::int64_t>()[0]);
  }
  ~BenchFile() {
    std::error_code ignored;
    if (is_first_) fs::remove(path_, ignored);
  }
  BenchFile(const BenchFile&) = delete;
  BenchFile& operator=(const BenchFile&) = delete;

  const fs::path& path() const { return path_; }

 private:
  bool is_first_;
  fs::path path_;
};

}  // namespace

void bench_checkpoint(const BenchCheckpointOptions& options) {
  launch(options.launch, [&](Communicator& comm) {
    pin_to_core(comm.rank());
    CheckpointBench bench(comm, options);
    const BenchFile file(comm, options.folder);
    const auto measurement = bench.run(file.path());
    comm.barrier();
    if (comm.rank() != 0) return;
    if (options.json) {
      print_json(measurement);
    } else {
      print_table(measurement, bench, comm, options.repeat);
    }
  });
}

}  // namespace switchyard::cli
