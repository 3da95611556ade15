// SPDX-License-Identifier: Apache-2.0
#include "soak/soak_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>

#include "between_ranks.h"
#include "soak/killing_communicator.h"
#include "soak/soak_check.h"
#include "soak/soak_model.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 120s;         // only reached by a hang
constexpr auto kTimeoutOfSilence = 5s;  // how long survivors of a silent rank wait
constexpr const char* kKilled = "this rank was told to die";

// The inputs of a group and the results of one rank alone, [step][layer].
struct Reference {
  std::vector<std::vector<SoakInput>> inputs;
  std::vector<std::vector<SoakResult>> results;
};

Device device_for(const SoakCase& c, const DeviceChoice& choice, int rank) {
  return choice.kind == DeviceKind::cpu ? Device::cpu({.num_threads = c.threads})
                                        : choice.make(rank);
}

Reference make_reference(const SoakCase& c, const DeviceChoice& choice, int group) {
  Reference reference;
  const Device device = choice.make();
  const auto alone = connect();
  SoakModel model(*alone, c, Form::plain, device);
  for (int s = 0; s < c.num_steps(); ++s) {
    std::vector<SoakInput> inputs;
    for (std::size_t l = 0; l < c.layers.size(); ++l) inputs.push_back(make_input(c, s, l, group));
    reference.results.push_back(model.step(inputs));
    reference.inputs.push_back(std::move(inputs));
  }
  return reference;
}

std::string place(int step, std::size_t layer) {
  return fmt::format("step {}, layer {}", step, layer);
}

// Adds `where` to any error that `check` throws, except for a CommunicationError.
template <typename Check>
void checked_at(const std::string& where, const Check& check) {
  try {
    check();
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(where + ": " + error.what());
  }
}

// Compares the results of one rank alone with the oracle. Layers whose results may differ from
// those of one rank are compared later.
void check_reference(const SoakCase& c, const Reference& reference) {
  for (int s = 0; s < c.num_steps(); ++s) {
    for (std::size_t l = 0; l < c.layers.size(); ++l) {
      if (!c.layers[l].has_bits_of_one_rank(c.room)) continue;
      const auto step = static_cast<std::size_t>(s);
      checked_at(place(s, l) + " on one rank", [&] {
        require_plain(c, l, reference.inputs[step][l], reference.results[step][l]);
      });
    }
  }
}

// One rank of a case.
class RankRun {
 public:
  RankRun(Communicator& group, const SoakCase& c, const SoakOptions& options,
          const Reference& reference, const Device& device, int group_number)
      : comm_(group),
        case_(c),
        options_(options),
        reference_(reference),
        group_(group_number),
        model_(group, c, Form::as_drawn, device) {}

  // Returns the number of expected errors that occurred.
  std::int64_t run() {
    for (int s = 0; s < case_.num_steps(); ++s) {
      if (s == case_.bad_step) try_bad_ids(s);
      run_step(s);
    }
    return num_errors_;
  }

 private:
  std::pair<std::int64_t, std::int64_t> range_of(int step) const {
    const auto by_rank = case_.tokens_of_group(step, group_);
    const auto mine = by_rank.begin() + comm_.rank();
    const auto first = std::accumulate(by_rank.begin(), mine, std::int64_t{0});
    return {first, first + *mine};
  }

  void run_step(int s) {
    const auto step = static_cast<std::size_t>(s);
    const auto [first, last] = range_of(s);
    std::vector<SoakInput> inputs;
    for (const auto& whole : reference_.inputs[step]) {
      inputs.push_back(slice_of(whole, first, last));
    }
    auto results = model_.step(inputs);
    if (case_.number == options_.broken_case) flip_a_bit(results[0].y);
    for (std::size_t l = 0; l < results.size(); ++l) {
      checked_at(fmt::format("{}, rank {}", place(s, l), comm_.rank()),
                 [&] { check(s, l, results[l], first); });
    }
  }

  void check(int s, std::size_t l, const SoakResult& result, std::int64_t first) {
    const SoakLayer& layer = case_.layers[l];
    const SoakInput& whole = reference_.inputs[static_cast<std::size_t>(s)][l];
    const SoakResult& one = reference_.results[static_cast<std::size_t>(s)][l];
    const ExpertPlacement& placement = model_.placement(l);
    require_status(result, layer, case_.room, placement, one.ids);
    if (result.is_refused) {
      ++num_errors_;
    } else if (layer.has_bits_of_one_rank(case_.room)) {
      require_bits_of_one_rank(result, one, placement, comm_.rank(), first);
      require_near_sum(comm_, result, one);
    } else {
      const SoakResult all = assemble(comm_, case_, l, placement, result, first, whole.x.rows());
      if (comm_.rank() == 0) require_plain(case_, l, whole, all);
      require_dropped(all, layer, placement);
    }
  }

  // Checks that the plan counts, by owner, exactly the picks without a slot as dropped.
  void require_dropped(const SoakResult& all, const SoakLayer& layer,
                       const ExpertPlacement& placement) const {
    if (case_.room != Room::drop || layer.options.capacity.factor > 0.0) return;
    std::vector<std::int64_t> dropped(static_cast<std::size_t>(comm_.size()));
    const auto ids = all.ids.span<std::int32_t>();
    const auto slots = all.slots.span<std::int32_t>();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && slots[i] < 0) ++dropped[static_cast<std::size_t>(placement.owner(ids[i]))];
    }
    if (dropped == all.status.dropped) return;
    throw std::runtime_error(fmt::format("the plan says that ranks dropped {}, but they dropped {}",
                                         all.status.dropped, dropped));
  }

  // The last rank with tokens gives an id that no expert has. All ranks must report that error.
  void try_bad_ids(int s) {
    const auto by_rank = case_.tokens_of_group(s, group_);
    int guilty = comm_.size() - 1;
    while (guilty >= 0 && by_rank[static_cast<std::size_t>(guilty)] == 0) --guilty;
    if (guilty < 0) return;
    const auto [first, last] = range_of(s);
    SoakInput input = slice_of(reference_.inputs[static_cast<std::size_t>(s)][0], first, last);
    const auto bad = static_cast<std::int32_t>(case_.layers[0].options.router.num_experts + 3);
    if (comm_.rank() == guilty) input.ids->span<std::int32_t>()[0] = bad;
    const std::string error = model_.error_of_forward(input);
    const std::string expected = fmt::format("rank {}: expert_ids[0,0] is {}", guilty, bad);
    if (error.find(expected) == std::string::npos) {
      throw std::runtime_error(
          fmt::format("a bad id before step {}: rank {} says \"{}\", not \"{}\"", s, comm_.rank(),
                      error, expected));
    }
    ++num_errors_;
  }

  void flip_a_bit(Tensor& y) const {
    if (y.bytes() > 0) y.data()[size_of(y.dtype()) - 1] ^= std::byte{0x40};
  }

  Communicator& comm_;
  const SoakCase& case_;
  const SoakOptions& options_;
  const Reference& reference_;
  int group_;
  SoakModel model_;
  std::int64_t num_errors_ = 0;
};

// Collective. Returns the number of expected errors that occurred.
std::int64_t run_rank(Communicator& comm, const SoakCase& c, const SoakOptions& options,
                      const std::vector<Reference>& references) {
  const Device device = device_for(c, options.device, comm.rank());
  const int group_number = comm.rank() % c.num_groups;
  const auto split = c.num_groups > 1 ? comm.split(group_number, comm.rank()) : nullptr;
  Communicator& group = split != nullptr ? *split : comm;
  try {
    RankRun run(group, c, options, references[static_cast<std::size_t>(group_number)], device,
                group_number);
    const std::int64_t num_errors = run.run();
    // On a GPU, nothing may be destroyed while other ranks are in a step.
    device.synchronize();
    comm.barrier();
    return num_errors;
  } catch (const std::exception& error) {  // tells the others why this rank leaves
    comm.abort(error.what());
    group.abort(error.what());
    throw;
  }
}

// How a rank's part of a case ended, if one rank was to be killed.
struct Ending {
  enum class Kind { finished, was_killed, heard_of_it, other } kind = Kind::other;
  std::string message = {};
  std::vector<int> named = {};
};

Ending run_killed_rank(Communicator& comm, const SoakCase& c, const SoakOptions& options,
                       const std::vector<Reference>& references,
                       const std::function<void()>& before_death) {
  bool is_dead = false;
  KillingCommunicator ranks(comm, [&](std::int64_t collective) {
    if (comm.rank() != c.kill->rank || collective != c.kill->collective) return;
    is_dead = true;
    before_death();
    throw std::runtime_error(kKilled);
  });
  try {
    run_rank(ranks, c, options, references);
    return {.kind = Ending::Kind::finished};
  } catch (const CommunicationError& error) {
    if (is_dead) return {.kind = Ending::Kind::was_killed};
    return {Ending::Kind::heard_of_it, error.what(), error.ranks()};
  } catch (const std::exception& error) {
    if (is_dead) return {.kind = Ending::Kind::was_killed};
    ranks.abort(error.what());
    return {Ending::Kind::other, error.what()};
  }
}

// Returns an empty string if this is how the rank must end.
std::string complaint_about(const Ending& ending, int rank, const SoakCase& c, bool was_killed) {
  const bool is_victim = rank == c.kill->rank;
  if (ending.kind == Ending::Kind::other) return ending.message;
  if (!was_killed) {  // there were not that many collectives
    if (ending.kind == Ending::Kind::finished) return {};
    return fmt::format("rank {} failed though nobody was killed: {}", rank, ending.message);
  }
  if (is_victim || (ending.kind == Ending::Kind::heard_of_it &&
                    ending.named == std::vector<int>{c.kill->rank})) {
    return {};
  }
  if (ending.kind == Ending::Kind::finished) {
    return fmt::format("rank {} did not notice that rank {} was killed", rank, c.kill->rank);
  }
  return fmt::format("rank {} was killed, but rank {} blames {}: {}", c.kill->rank, rank,
                     ending.named, ending.message);
}

void run_killed_on_threads(const SoakCase& c, const SoakOptions& options,
                           const std::vector<Reference>& references, SoakFigures& figures) {
  std::vector<Ending> endings(static_cast<std::size_t>(c.num_ranks));
  std::atomic<int> num_ended = 0;
  const bool is_silent = c.kill->kind == KillKind::silent;
  const auto wait_for_survivors = [&] {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (is_silent && num_ended < c.num_ranks - 1 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
    }
  };
  run_ranks(c.num_ranks,
            [&](Communicator& comm) {
              endings[static_cast<std::size_t>(comm.rank())] =
                  run_killed_rank(comm, c, options, references, wait_for_survivors);
              ++num_ended;
            },
            {.timeout = is_silent ? kTimeoutOfSilence : kTimeout});
  const auto& victim = endings[static_cast<std::size_t>(c.kill->rank)];
  const bool was_killed = victim.kind == Ending::Kind::was_killed;
  for (int r = 0; r < c.num_ranks; ++r) {
    const auto complaint = complaint_about(endings[static_cast<std::size_t>(r)], r, c, was_killed);
    if (!complaint.empty()) throw std::runtime_error(complaint);
  }
  figures.kills += was_killed ? 1 : 0;
}

void add_steps(const SoakCase& c, std::int64_t num_errors, SoakFigures& figures) {
  ++figures.cases;
  figures.steps += c.num_steps();
  figures.errors += num_errors;
  for (const auto& by_rank : c.tokens) {
    figures.tokens += std::accumulate(by_rank.begin(), by_rank.end(), std::int64_t{0});
  }
}

}  // namespace

void run_on_threads(const SoakCase& c, const SoakOptions& options, SoakFigures& figures) {
  std::vector<Reference> references;
  for (int g = 0; g < c.num_groups; ++g) {
    references.push_back(make_reference(c, options.device, g));
    check_reference(c, references.back());
  }
  if (c.kill && options.kills) run_killed_on_threads(c, options, references, figures);
  std::atomic<std::int64_t> num_errors = 0;
  run_ranks(c.num_ranks,
            [&](Communicator& comm) {
              const auto mine = run_rank(comm, c, options, references);
              if (comm.rank() == 0) num_errors = mine;
            },
            {.timeout = kTimeout});
  add_steps(c, num_errors, figures);
}

void run_on_processes(Communicator& world, const SoakCase& c, const SoakOptions& options,
                      SoakFigures& figures) {
  std::vector<Reference> references(static_cast<std::size_t>(c.num_groups));
  std::int64_t num_errors = 0;
  bool was_killed = false;
  // Errors in `body` leave `world` usable.
  const auto on_all = [&](const std::function<void(Communicator&)>& body) {
    const auto error = try_on_ranks(world, body);
    if (!error.empty()) throw std::runtime_error(error);
  };
  on_all([&](Communicator& comm) {
    const int group = comm.rank() % c.num_groups;
    auto& reference = references[static_cast<std::size_t>(group)];
    reference = make_reference(c, options.device, group);
    if (comm.rank() < c.num_groups) check_reference(c, reference);
  });
  if (c.kill && options.kills) {
    const auto ranks = world.split(0, world.rank());
    const Ending ending = run_killed_rank(*ranks, c, options, references, [] {});
    was_killed = reduce_number(world, ending.kind == Ending::Kind::was_killed ? 1 : 0) > 0;
    on_all([&](Communicator&) {
      const auto complaint = complaint_about(ending, world.rank(), c, was_killed);
      if (!complaint.empty()) throw std::runtime_error(complaint);
    });
  }
  on_all([&](Communicator& comm) { num_errors = run_rank(comm, c, options, references); });
  figures.kills += was_killed ? 1 : 0;
  add_steps(c, num_errors, figures);
}

}  // namespace switchyard::cli
