// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job in which another comes to grief during dispatch. Every rank writes what it
// saw to DIR/rank<N>, and its pid to DIR/pid<N>.
//   rank_failure DIR SCENARIO TIMEOUT_MS
// Scenarios, all by rank 2, or the last of fewer: kill (SIGKILL), stop (SIGSTOP), throw, exit,
// late, mismatch (another call), counts (rows that the receiver does not expect), sizes (twice the
// bytes of the others, in calls that each have a communicator of their own). And none; subgroup
// (which outlives the world) and subgroup-fails (while the world is well): these must just end.
// until-stop dispatches until the file DIR/stop exists, and creates DIR/ready once it is running.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/mpi_rank.h"
#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;

int victim_of(const Communicator& comm) { return std::min(2, comm.size() - 1); }

void come_to_grief(const std::string& scenario, Communicator& comm) {
  if (scenario == "kill") ::raise(SIGKILL);
  if (scenario == "stop") ::raise(SIGSTOP);
  if (scenario == "throw") throw std::runtime_error("out of coffee");
  if (scenario == "exit") ::_exit(0);
  if (scenario == "late") std::this_thread::sleep_for(3 * comm.timeout());
  if (scenario == "mismatch") comm.barrier();
  if (scenario == "counts") {
    Tensor rows({8, 64}, Dtype::f32);
    Tensor received({8, 64}, Dtype::f32);
    std::vector<std::int64_t> none(static_cast<std::size_t>(comm.size()), 0);
    comm.all_to_all(rows, none, received, none);
  }
}

void dispatch_for_ever(Communicator& comm, const std::string& scenario) {
  Dispatcher dispatcher(comm, ExpertPlacement::contiguous(8, comm.size()),
                        {.plan = {.hidden = 64}});
  Tensor ids({32, 2}, Dtype::i32);
  for (std::size_t i = 0; i < 64; ++i) {
    ids.span<std::int32_t>()[i] = static_cast<std::int32_t>(i % 8);
  }
  const Tensor x = Tensor::zeros({32, 64}, Dtype::f32);
  if (scenario == "kill" && comm.rank() == victim_of(comm)) {
    // From another thread, at a moment that falls anywhere into the loop.
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ::raise(SIGKILL);
    }).detach();
    for (;;) (void)dispatcher.dispatch(dispatcher.plan(ids), x);
  }
  for (int step = 0; scenario != "none" || step < 20; ++step) {
    const Plan plan = dispatcher.plan(ids);
    if (step == 10 && comm.rank() == victim_of(comm)) come_to_grief(scenario, comm);
    (void)dispatcher.dispatch(plan, x);
  }
}

void dispatch_until_stop(Communicator& comm, const std::filesystem::path& folder) {
  Dispatcher dispatcher(comm, ExpertPlacement::contiguous(8, comm.size()),
                        {.plan = {.hidden = 64, .duplicate_ids = DuplicateIds::allow}});
  const Tensor ids = Tensor::zeros({32, 2}, Dtype::i32);
  const Tensor x = Tensor::zeros({32, 64}, Dtype::f32);
  Tensor is_over = Tensor::zeros({1}, Dtype::i32);
  for (int step = 0; is_over.span<std::int32_t>()[0] == 0; ++step) {
    (void)dispatcher.dispatch(dispatcher.plan(ids), x);
    if (comm.rank() == 0) {
      if (step == 10) std::ofstream(folder / "ready") << step;
      is_over.span<std::int32_t>()[0] = std::filesystem::exists(folder / "stop") ? 1 : 0;
    }
    comm.broadcast(is_over, 0);
  }
}

std::string error_of_sizes(Communicator& comm, const std::string& call, std::int64_t bytes) {
  const int victim = victim_of(comm);
  const Shape row{1, (comm.rank() == victim ? 2 : 1) * bytes / 4};
  const Tensor send = Tensor::zeros(row, Dtype::f32);
  const Tensor send_to_all = Tensor::zeros(row.with_rows(comm.size()), Dtype::f32);
  // Only the first half is received into; a message that is too long would write to the second.
  Tensor memory = Tensor::from<float>(
      row.with_rows(2 * comm.size()),
      std::vector<float>(static_cast<std::size_t>(2 * comm.size() * row.num_elements()), 1.0F));
  const TensorView received = memory.view().slice(0, comm.size());
  const std::vector<std::int64_t> ones(static_cast<std::size_t>(comm.size()), 1);
  std::string message = "no error";
  try {
    if (call == "all_gather") comm.all_gather(send, received);
    if (call == "broadcast") comm.broadcast(received, victim);
    if (call == "all_to_all") comm.all_to_all(send_to_all, ones, received, ones);
    comm.barrier();  // by then a root, too, has heard of it
  } catch (const CommunicationError& error) {
    message = error.what();
  }
  const auto rest = memory.view().slice(comm.size(), 2 * comm.size()).span<float>();
  const bool is_whole = std::ranges::all_of(rest, [](float value) { return value == 1.0F; });
  return is_whole ? message : "memory was overwritten: " + message;
}

std::string bring_other_sizes(std::chrono::milliseconds timeout) {
  std::string outcome;
  for (const char* call : {"all_gather", "broadcast", "all_to_all"}) {
    for (const std::int64_t bytes : {8, 1 << 20}) {
      const auto comm = connect({.backend = "mpi", .timeout = timeout});
      outcome += error_of_sizes(*comm, call, bytes) + "\n";
    }
  }
  return outcome;
}

// A group of all but rank 0, destroyed after the world that it was split from; a failure in it is
// caught.
void use_subgroup(std::unique_ptr<Communicator> world, bool fails) {
  const auto group = world->split(world->rank() == 0 ? -1 : 0, 0);
  if (group && fails) {
    try {
      Tensor values({1}, Dtype::f32);
      group->broadcast(values, group->rank() == 0 ? 99 : 0);
    } catch (const Error&) {
    }
  }
  world->barrier();
  world.reset();
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::filesystem::path folder = argv[1];
  const std::string scenario = argv[2];
  auto comm = connect({.backend = "mpi", .timeout = std::chrono::milliseconds(std::atoi(argv[3]))});
  testing::write_pid(folder, comm->rank(), ::getpid());
  if (scenario.starts_with("subgroup")) {
    use_subgroup(std::move(comm), scenario == "subgroup-fails");
    return 0;
  }
  testing::write_what_happens(folder, *comm, [&]() -> std::string {
    if (scenario == "sizes") return bring_other_sizes(comm->timeout());
    if (scenario == "until-stop") {
      dispatch_until_stop(*comm, folder);
      return "no error";
    }
    dispatch_for_ever(*comm, scenario);
    return "no error";
  });
  return 0;
}
