// SPDX-License-Identifier: Apache-2.0
// Reads bytes as a configuration of switchyard train, and asks what such a run would need.
#include <string_view>

#include "fuzz_target.h"
#include "options/options.h"
#include "run/resources.h"

namespace switchyard::train {
namespace {

void read(std::string_view text) {
  const auto config = merge(std::nullopt, parse_config(text, "config"), {});
  const auto written = to_json(config);
  TrainConfig again;
  assign(again, parse_config(written, "written"));
  fuzz::check(to_json(again) == written);
  constexpr int kRanks = 4;
  check(config, kRanks);
  const auto need = memory_of_training(config, {.ranks = kRanks, .ranks_here = kRanks}, 1000);
  fuzz::check(need.total() > 0 && need.parameters > 0 && need.step >= 0);
  fuzz::check(num_idle_ranks(config, kRanks) < kRanks);
}

}  // namespace
}  // namespace switchyard::train

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    switchyard::train::read({reinterpret_cast<const char*>(data), size});
  } catch (const switchyard::InvalidArgument&) {  // as it should be
  }
  return 0;
}
