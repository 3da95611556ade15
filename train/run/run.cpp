// SPDX-License-Identifier: Apache-2.0
#include "run/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "checkpoints/checkpoints.h"
#include "common/sum_over_ranks.h"
#include "model/model_size.h"
#include "options/options.h"
#include "report/report.h"
#include "run/console.h"
#include "run/origin.h"
#include "run/resources.h"
#include "run/sampler.h"
#include "run/stop_signals.h"
#include "run/summary.h"
#include "switchyard/agreement.h"
#include "switchyard/error.h"
#include "training/trainer.h"

namespace switchyard::train {
namespace {

constexpr std::int64_t kLoadRecords = 200;  // per run, about

Device device_of(const TrainConfig& config, int num_ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return Device::cpu(
      {.num_threads = config.threads > 0 ? config.threads : std::max(1, cores / num_ranks)});
}

// Collective.
std::shared_ptr<const Corpus> read_corpus(Communicator& world, const std::string& path) {
  std::shared_ptr<const Corpus> corpus;
  agree(world, [&] { corpus = shared_corpus(path); });
  require_equal(world, fmt::format("the text {} (its hash)", corpus->name()),
                static_cast<std::int64_t>(corpus->hash()));
  return corpus;
}

// mpirun gives each rank a terminal of its own, wherever the output ends up.
ConsoleMode mode_of(const TrainConfig& config, const Communicator& world) {
  if (config.json) return ConsoleMode::json;
  return world.backend() == "mpi" ? ConsoleMode::plain : Console::mode_of_this_terminal();
}

// One run on one rank.
class Run {
 public:
  Run(Communicator& world, const TrainConfig& config, const Program& program)
      : config_(config),
        program_(program),
        world_(world),
        mesh_(world, mesh_axes(config.mesh, world.size())),
        text_(read_corpus(world, config.data.corpus)),
        trainer_(config, mesh_, device_of(config, world.size()), *text_) {
    if (world.rank() == 0) {
      console_.emplace(mode_of(config, world), config.steps, ConsoleOutput{.is_in_a_hurry = [this] {
                         return stopped_ || signals_.received();
                       }});
    }
  }

  void begin() {
    if (!config_.save.empty()) lock_ = prepare_folder(world_, config_.save, config_.resume);
    if (!config_.resume.empty()) resume();
    introduce();
    if (trainer_.progress().step >= config_.steps) {
      say(
          fmt::format("there is nothing left to train: step {} is done and --steps is {}; give a "
                      "larger --steps",
                      trainer_.progress().step, config_.steps));
    }
    begin_report();
  }

  void train() {
    while (trainer_.progress().step < config_.steps && !stopped_) {
      const StepRecord record = trainer_.step();
      if (console_) console_->step(record);
      const bool is_last = record.step == config_.steps;
      const bool evaluates =
          config_.evaluate_every > 0 && record.step % config_.evaluate_every == 0 && !is_last;
      if (evaluates) evaluate();
      const double wishes = signals_.received() ? 1.0 : 0.0;
      stopped_ = sum_over_ranks(world_, {&wishes, 1})[0] > 0.0;
      const bool is_due = record.step % config_.every == 0 || is_last || stopped_;
      if (record.step % load_interval() == 0 || is_due) {
        trainer_.history().add(LoadRecord{record.step, trainer_.take_load()});
      }
      if (!config_.save.empty() && is_due) save(trainer_, config_.save, config_.keep);
      if (evaluates) write_report();
    }
  }

  RunEnd end() {
    if (stopped_) {
      say_stopped();
      world_.barrier();  // a launcher may kill the others once one has left
      return RunEnd::stopped;
    }
    evaluate();
    const double held_out = trainer_.history().held_out.back().loss;
    if (console_) console_->finish();
    if (config_.sample_bytes > 0) sample_text();
    say(fmt::format("held-out loss: {:.2f} nats per byte", held_out));
    say(fmt::format("bigram loss:   {:.2f} nats per byte, for a bigram model on the same text",
                    bigram_));
    state_ = RunState::completed;
    write_report();
    say_where();
    if (console_) console_->result(held_out, bigram_, written_report());
    return RunEnd::completed;
  }

 private:
  void say(const std::string& line) {
    if (console_) console_->say(line);
  }

  std::int64_t load_interval() const {
    return std::max<std::int64_t>(1, config_.steps / kLoadRecords);
  }

  void resume() {
    const auto header = read_header(world_, config_.resume);
    load(trainer_, header);
    trainer_.history().add(ResumeRecord{header.progress.step, began_});
    seconds_before_ = trainer_.history().seconds();
    say(fmt::format("resumed {} after step {}", header.path.string(), header.progress.step));
    if (header.corpus_hash != text_->hash()) {
      say(fmt::format("note: {} is not the text that this checkpoint was trained on",
                      text_->name()));
    }
  }

  void introduce() {
    const ModelConfig& m = config_.model;
    const ModelSize size = size_of(m);
    say(fmt::format("{}; {} thread{} each", describe(mesh_),
                    trainer_.model().compute().device().num_threads(),
                    trainer_.model().compute().device().num_threads() == 1 ? "" : "s"));
    say(
        fmt::format("model: {} layers, H {}, {} experts of I {}, {} picks; {:.2f} M parameters, "
                    "{:.2f} M of them active",
                    m.layers, m.hidden, m.experts, m.intermediate, m.top_k,
                    static_cast<double>(size.parameters) * 1e-6,
                    static_cast<double>(size.active_parameters) * 1e-6));
    say(fmt::format("text: {}, {:.2f} MB to train on, {:.2f} MB held out", text_->name(),
                    static_cast<double>(text_->training().size()) * 1e-6,
                    static_cast<double>(text_->held_out().size()) * 1e-6));
    say(fmt::format("{} steps of {} x {} bytes", config_.steps, config_.data.batch, m.context));
    if (const int idle = num_idle_ranks(config_, world_.size()); idle > 0) {
      say(
          fmt::format("warning: {} of {} ranks will be idle: a batch of {} sequences of {} bytes "
                      "and {} experts per layer leave no work for them",
                      idle, world_.size(), config_.data.batch, m.context, m.experts));
    }
  }

  void evaluate() {
    const HeldOutRecord record{trainer_.progress().step, trainer_.held_out_loss()};
    trainer_.history().add(record);
    if (console_) console_->held_out(record);
  }

  void sample_text() {
    sample_ = sample(
        trainer_.model(), config_.prompt,
        {.bytes = config_.sample_bytes, .temperature = config_.temperature, .seed = config_.seed});
    say(fmt::format("\nsample, after \"{}\":", config_.prompt));
    say(config_.prompt + sample_ + "\n");
  }

  // Collective.
  RunSummary summary_of_now() {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
    RunSummary summary = summarise(trainer_, seconds_before_ + seconds.count());
    summary.origin = gather_origin(world_, *text_, program_, began_);
    summary.state = state_;
    summary.bigram_loss = bigram_;
    if (!summary.history.held_out.empty()) {
      summary.held_out_loss = summary.history.held_out.back().loss;
    }
    summary.prompt = config_.prompt;
    summary.sample = sample_;
    return summary;
  }

  // Writes the first report. An error throws: before the first step, failing costs nothing.
  void begin_report() {
    if (config_.report.empty()) return;
    const RunSummary summary = summary_of_now();
    agree(world_, [&] {
      if (world_.rank() == 0) train::write_report(config_.report, summary);
    });
  }

  // Writes a later report. An error only warns: the run is worth more than its report.
  void write_report() {
    if (config_.report.empty()) return;
    const RunSummary summary = summary_of_now();
    agree(world_, [&] {
      if (world_.rank() == 0) try_to_write(summary);
    });
  }

  void try_to_write(const RunSummary& summary) {
    report_error_.clear();
    try {
      train::write_report(config_.report, summary);
    } catch (const StorageError& error) {
      report_error_ = error.what();
      if (!warned_of_.insert(report_error_).second) return;
      say(fmt::format("warning: {}; the run continues", report_error_));
    }
  }

  // Returns an empty string if there is no report, or if its last update failed.
  std::string written_report() const {
    return report_error_.empty() ? config_.report : std::string();
  }

  void say_where() {
    if (!config_.save.empty()) say(fmt::format("checkpoints: {}", config_.save));
    if (!written_report().empty()) say(fmt::format("report: {}", written_report()));
  }

  void say_stopped() {
    if (console_) console_->finish();
    state_ = RunState::stopped;
    write_report();
    const auto step = trainer_.progress().step;
    if (config_.save.empty()) {
      say(fmt::format("stopped after step {}; nothing was saved, because --save was not given",
                      step));
    } else {
      say(fmt::format("stopped and saved after step {}; continue with --resume {}", step,
                      config_.save));
    }
    say_where();
    if (console_) console_->stopped(step, config_.save);
  }

  TrainConfig config_;
  Program program_;
  FolderLock lock_;
  Communicator& world_;
  StopSignals signals_;
  Mesh mesh_;
  std::shared_ptr<const Corpus> text_;
  Trainer trainer_;
  std::optional<Console> console_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::int64_t began_ = common_time(world_);
  RunState state_ = RunState::running;
  double seconds_before_ = 0.0;  // time of the steps before the run was resumed
  double bigram_ = trainer_.bigram_loss();
  std::string sample_;
  std::string report_error_;         // error of the last attempt; on rank 0
  std::set<std::string> warned_of_;  // each is reported once
  bool stopped_ = false;
};

}  // namespace

RunEnd run(Communicator& world, const TrainConfig& config, const Program& program) {
  TrainConfig here = config;
  fit_mesh(here, world.size());
  Run run(world, here, program);
  run.begin();
  run.train();
  return run.end();
}

}  // namespace switchyard::train
