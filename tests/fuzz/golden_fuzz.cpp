// SPDX-License-Identifier: Apache-2.0
// Opens bytes as a recorded case, and divides it over ranks.
#include "fuzz_target.h"
#include "safetensors_mutator.h"
#include "verify/golden_case.h"

namespace switchyard::cli {
namespace {

void read(const std::filesystem::path& path) {
  const auto golden = GoldenCase::read(path);
  constexpr int kMostRanks = 64;
  fuzz::check(golden.num_ranks() >= 0 && golden.num_ranks() <= kMostRanks);
  const int ranks = golden.num_ranks() == 0 ? 3 : golden.num_ranks();
  for (const auto& division : golden.divisions(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto part = golden.rank_case(division, rank);
      fuzz::touch(part.x);
      fuzz::touch(part.weights.router.gate);
      for (const auto& expert : part.weights.experts) fuzz::touch(expert.down);
    }
  }
}

}  // namespace
}  // namespace switchyard::cli

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const switchyard::fuzz::MemoryFile kFile;
  kFile.write(data, size);
  try {
    switchyard::cli::read(kFile.path());
  } catch (const switchyard::InvalidArgument&) {  // as it should be
  } catch (const switchyard::Unsupported&) {
  }
  return 0;
}
