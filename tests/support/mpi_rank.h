// SPDX-License-Identifier: Apache-2.0
// The files that a rank of an MpiJob writes.
#pragma once

#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "switchyard/communicator.h"
#include "switchyard/error.h"

namespace switchyard::testing {

inline void write_pid(const std::filesystem::path& folder, int rank, int pid) {
  std::ofstream(folder / ("pid" + std::to_string(rank))) << pid;
}
inline void write_outcome(const std::filesystem::path& folder, int rank, const std::string& outcome,
                          double seconds) {
  const auto name = "rank" + std::to_string(rank);
  std::ofstream(folder / (name + ".part")) << outcome << "\nseconds: " << seconds << "\n";
  std::filesystem::rename(folder / (name + ".part"), folder / name);  // atomic: complete or absent
}

// Writes the result of `work`, or the error that it throws. If `comm` is given, an error of this
// rank's own aborts it, so that the other ranks learn of it.
inline void write_what_happens(const std::filesystem::path& folder, int rank, Communicator* comm,
                               const std::function<std::string()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  std::string outcome;
  try {
    outcome = work();
  } catch (const CommunicationError& error) {
    outcome = std::string("CommunicationError: ") + error.what() + "\nranks:";
    for (const int culprit : error.world_ranks()) outcome += " " + std::to_string(culprit);
  } catch (const std::exception& error) {
    outcome = std::string("error: ") + error.what();
    if (comm != nullptr) comm->abort(error.what());
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  write_outcome(folder, rank, outcome, spent.count());
}
inline void write_what_happens(const std::filesystem::path& folder, Communicator& comm,
                               const std::function<std::string()>& work) {
  write_what_happens(folder, comm.rank(), &comm, work);
}

}  // namespace switchyard::testing
