// SPDX-License-Identifier: Apache-2.0
// A job under mpirun. Each rank N writes its outcome to the file rank<N> of a folder, and its pid
// to pid<N>.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace switchyard::testing {

class MpiJob {
 public:
  MpiJob() { make_folder(); }
  ~MpiJob() {
    end();
    std::filesystem::remove_all(folder_);
  }
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  // Starts ranks of a program, passing the folder as its first argument. When a rank dies, mpirun
  // lets the others live.
  void start(const std::string& mpirun, int num_ranks, const std::string& program,
             const std::string& arguments) {
    num_ranks_ = num_ranks;
    const std::string command = mpirun + " -n " + std::to_string(num_ranks) +
                                " --enable-recovery " + program + " " + folder_.string() + " " +
                                arguments + " > " + (folder_ / "log").string() + " 2>&1";
    thread_ = std::thread([this, command] {
      (void)std::system(command.c_str());
      has_ended_ = true;
    });
  }

  // Ends the running job, if any, so that another can start.
  void restart() {
    end();
    std::filesystem::remove_all(folder_);
    has_ended_ = false;
    make_folder();
  }

  // Waits for a rank's outcome and returns it; empty if it did not come in time.
  std::string outcome_of(int rank, std::chrono::seconds wait) const {
    const auto file = folder_ / ("rank" + std::to_string(rank));
    wait_until(wait, [&] { return std::filesystem::exists(file) || has_ended_; });
    return read(file);
  }
  static double seconds_in(const std::string& outcome) {
    const auto at = outcome.rfind("seconds: ");
    return at == std::string::npos ? 1e9 : std::stod(outcome.substr(at + 9));
  }
  bool ends_within(std::chrono::seconds wait) const {
    wait_until(wait, [&] { return has_ended_.load(); });
    return has_ended_;
  }
  bool logs_within(std::chrono::seconds wait, const std::string& words) const {
    const auto is_there = [&] { return log().find(words) != std::string::npos; };
    wait_until(wait, is_there);
    return is_there();
  }
  std::string log() const { return read(folder_ / "log"); }

  void end() {
    for (int rank = 0; rank < num_ranks_ && !has_ended_; ++rank) {
      const auto text = read(folder_ / ("pid" + std::to_string(rank)));
      if (!text.empty()) ::kill(std::stoi(text), SIGKILL);
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void make_folder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "switchyard-failure-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  template <typename Happened>
  static void wait_until(std::chrono::seconds wait, Happened happened) {
    const auto end = std::chrono::steady_clock::now() + wait;
    while (!happened() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  static std::string read(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
  int num_ranks_ = 0;
  std::thread thread_;
  std::atomic<bool> has_ended_ = false;
};

}  // namespace switchyard::testing
