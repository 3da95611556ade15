// SPDX-License-Identifier: Apache-2.0
// Runs every misuse in a process of its own: it must throw an Error that says what is wrong, and
// neither crash nor wait. `--functions` prints the functions of the table, `NAME` runs those of
// one.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <exception>
#include <set>
#include <string_view>

#include "misuse/misuse.h"
#include "support/child.h"
#include "switchyard/error.h"

namespace switchyard::misuse {
namespace {

constexpr unsigned kMostSeconds = 60;  // only a call that hangs takes as long
constexpr std::array kKinds{"null",        "empty",      "dtype", "device",     "shape",
                            "overlapping", "misaligned", "huge",  "moved from", "out of range"};
constexpr std::string_view kRefused = "refused";

std::vector<Misuse> whole_table() {
  std::vector<Misuse> all;
  for (const auto& part : {of_tensors(), of_ranks(), of_parallel(), of_plans(), of_experts(),
                           of_layers(), of_files(), of_c_devices(), of_c_ranks()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::string result_of(const Misuse& misuse) {
  return testing::in_child([&]() -> std::string {
    ::alarm(kMostSeconds);
    try {
      misuse.call();
    } catch (const Error& error) {
      const std::string message = error.what();
      if (message.find(misuse.words) != std::string::npos) return std::string(kRefused);
      return "said \"" + message + "\", not \"" + misuse.words + "\"";
    } catch (const std::exception& error) {
      return std::string("threw no Error of the library: ") + error.what();
    }
    return "was accepted";
  });
}

}  // namespace
}  // namespace switchyard::misuse

int main(int argc, char** argv) {
  using namespace switchyard::misuse;
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  const auto table = whole_table();
  if (wanted == "--functions") {
    std::set<std::string> names;
    for (const auto& misuse : table) names.insert(misuse.function);
    for (const auto& name : names) std::puts(name.c_str());
    return 0;
  }
  int failures = 0;
  for (const auto& misuse : table) {
    if (!wanted.empty() && misuse.function.find(wanted) == std::string::npos) continue;
    const std::string result = result_of(misuse);
    if (result == kRefused) continue;
    ++failures;
    std::printf("%s, %s: %s\n", misuse.function.c_str(),
                kKinds[static_cast<std::size_t>(misuse.kind)], result.c_str());
  }
  std::printf("%zu misuses, %d of them not refused as they should be\n", table.size(), failures);
  return failures == 0 ? 0 : 1;
}
