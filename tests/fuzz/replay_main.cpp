// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target without libFuzzer: every file of a corpus, then seeded changes of them.
//   replay CORPUS MUTATIONS
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz_target.h"
#include "support/random.h"

extern "C" __attribute__((weak)) std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data,
                                                                     std::size_t size,
                                                                     std::size_t max_size,
                                                                     unsigned seed);

namespace {

namespace fs = std::filesystem;
using Input = std::string;

constexpr std::size_t kMaxSize = 4096;
// A sanitizer reserves addresses without end and keeps what was freed; without one, less will do.
#ifdef SWITCHYARD_SANITIZED
constexpr rlim_t kMaxAddresses = RLIM_INFINITY;
constexpr long kMaxResidentKilobytes = 1L << 20;
#else
constexpr rlim_t kMaxAddresses = rlim_t{1} << 29;
constexpr long kMaxResidentKilobytes = 1L << 16;
#endif

switchyard::testing::Random& random_source() {
  static switchyard::testing::Random source(2024);
  return source;
}

std::size_t below(std::size_t bound) {
  return static_cast<std::size_t>(random_source().below(static_cast<std::int64_t>(bound)));
}

std::vector<Input> read_corpus(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void flip_bit(Input& input) {
  auto& byte = input[below(input.size())];
  byte = static_cast<char>(static_cast<unsigned char>(byte) ^ (1U << below(8)));
}

void write_symbol(Input& input) {
  constexpr std::string_view kSymbols = "{}[]\":,.-e0123456789FIB \\/";
  input[below(input.size())] = kSymbols[below(kSymbols.size())];
}

void cut_short(Input& input) { input.resize(below(input.size())); }

void repeat_part(Input& input) {
  const auto from = below(input.size());
  input.insert(below(input.size()), input.substr(from, 1 + below(64)));
}

void remove_part(Input& input) { input.erase(below(input.size()), 1 + below(16)); }

// A number, found from anywhere on, becomes one at which arithmetic goes wrong.
void swap_number(Input& input) {
  constexpr std::array kNumbers{"0",
                                "1",
                                "-1",
                                "2147483648",
                                "4294967295",
                                "9223372036854775807",
                                "1e999",
                                "1.5",
                                "18446744073709551615",
                                "4294967296",
                                "18446744073709551616"};
  constexpr std::string_view kDigits = "0123456789";
  const auto first = input.find_first_of(kDigits, below(input.size()));
  if (first == Input::npos) return;
  const auto last = std::min(input.find_first_not_of(kDigits, first), input.size());
  input.replace(first, last - first, kNumbers[below(kNumbers.size())]);
}

Input spliced(const Input& a, const Input& b) {
  return a.substr(0, below(a.size() + 1)) + b.substr(below(b.size() + 1));
}

const std::uint8_t* bytes_of(const Input& input) {
  return reinterpret_cast<const std::uint8_t*>(input.data());
}

Input mutated(const std::vector<Input>& corpus) {
  Input input = corpus[below(corpus.size())];
  if (below(8) == 0) input = spliced(input, corpus[below(corpus.size())]);
  auto size = std::min(input.size(), kMaxSize);
  input.resize(kMaxSize);
  auto* data = reinterpret_cast<std::uint8_t*>(input.data());
  size = LLVMFuzzerCustomMutator != nullptr
             ? LLVMFuzzerCustomMutator(data, size, kMaxSize, static_cast<unsigned>(below(1U << 31)))
             : LLVMFuzzerMutate(data, size, kMaxSize);
  input.resize(size);
  return input;
}

void limit_memory() {
  const rlimit limit{kMaxAddresses, kMaxAddresses};
  ::setrlimit(RLIMIT_AS, &limit);
}

}  // namespace

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size,
                                        std::size_t max_size) {
  constexpr std::array kChanges{&flip_bit,    &write_symbol, &cut_short,
                                &repeat_part, &remove_part,  &swap_number};
  Input input(reinterpret_cast<const char*>(data), size);
  for (std::size_t i = 0; i <= below(3) && !input.empty(); ++i) {
    kChanges[below(kChanges.size())](input);
  }
  input.resize(std::min(input.size(), max_size));
  std::copy(input.begin(), input.end(), data);
  return input.size();
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  limit_memory();
  const auto corpus = read_corpus(argv[1]);
  const auto num_inputs = corpus.size() + std::stoul(argv[2]);
  Input input;
  for (std::size_t i = 0; i < num_inputs; ++i) {
    input = i < corpus.size() ? corpus[i] : mutated(corpus);
    try {
      LLVMFuzzerTestOneInput(bytes_of(input), input.size());
    } catch (const std::exception& error) {
      std::ofstream("finding", std::ios::binary) << input;
      std::printf("input %zu, kept as ./finding: %s\n", i, error.what());
      return 1;
    }
  }
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  std::printf("%zu executions, %zu of them the corpus; at most %ld KiB resident\n", num_inputs,
              corpus.size(), usage.ru_maxrss);
  return corpus.empty() || usage.ru_maxrss > kMaxResidentKilobytes ? 1 : 0;
}
