// SPDX-License-Identifier: Apache-2.0
// Benchmarks the row kernels of each instruction set on rows that stay in cache, so that memory
// does not limit them. Compare with memcpy of the same bytes; `switchyard bench dispatch` covers
// the rest.
#include <benchmark/benchmark.h>

#include <array>
#include <cstring>

#include "device/cpu/simd/row_kernels.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kHidden = 2048;
constexpr int kTerms = 2;

// One row in and kTerms rows out, or the reverse.
struct Rows {
  explicit Rows(Dtype dtype)
      : one(Tensor::zeros({kHidden}, dtype)), many(Tensor::zeros({kTerms, kHidden}, dtype)) {
    for (int c = 0; c < kTerms; ++c) places[static_cast<std::size_t>(c)] = many.view().row(c);
  }
  std::int64_t bytes() const { return one.bytes() + many.bytes(); }

  Tensor one;
  Tensor many;
  std::array<std::byte*, kTerms> places{};
  std::array<float, kTerms> weights{0.25F, 0.75F};
};

const RowKernels::Typed& typed(const RowKernels& kernels, Dtype dtype) {
  return dtype == Dtype::f32 ? kernels.f32 : kernels.bf16;
}

void copy(benchmark::State& state, const RowKernels* kernels, Dtype dtype) {
  Rows rows(dtype);
  for (auto _ : state) {
    kernels->copy(rows.places.data(), kTerms, rows.one.data(), rows.one.bytes(), Stores::cached);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * rows.bytes());
}

void scale(benchmark::State& state, const RowKernels* kernels, Dtype dtype) {
  Rows rows(dtype);
  for (auto _ : state) {
    typed(*kernels, dtype)
        .scale(rows.places.data(), rows.weights.data(), kTerms, rows.one.data(), kHidden,
               Stores::cached);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * rows.bytes());
}

void sum(benchmark::State& state, const RowKernels* kernels, Dtype dtype) {
  Rows rows(dtype);
  const SumTerms terms{.rows = rows.places.data(), .weights = rows.weights.data(), .count = kTerms};
  for (auto _ : state) {
    typed(*kernels, dtype).sum(rows.one.data(), terms, kHidden, Stores::cached);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * rows.bytes());
}

void dot(benchmark::State& state, const RowKernels* kernels, Dtype dtype) {
  Rows rows(dtype);
  for (auto _ : state) {
    benchmark::DoNotOptimize(typed(*kernels, dtype).dot(rows.one.data(), rows.places[0], kHidden));
  }
  state.SetBytesProcessed(state.iterations() * 2 * rows.one.bytes());
}

void plain_memcpy(benchmark::State& state) {
  Rows rows(Dtype::f32);
  for (auto _ : state) {
    for (std::byte* place : rows.places) {
      std::memcpy(place, rows.one.data(), static_cast<std::size_t>(rows.one.bytes()));
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * rows.bytes());
}
BENCHMARK(plain_memcpy);

const bool kRegistered = [] {
  for (const RowKernels* kernels : row_kernels_of_this_cpu()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const auto name = [&](const char* kernel) {
        return std::string(kernel) + "/" + kernels->name + "/" + std::string(name_of(dtype));
      };
      benchmark::RegisterBenchmark(name("copy").c_str(), copy, kernels, dtype);
      benchmark::RegisterBenchmark(name("scale").c_str(), scale, kernels, dtype);
      benchmark::RegisterBenchmark(name("sum").c_str(), sum, kernels, dtype);
      benchmark::RegisterBenchmark(name("dot").c_str(), dot, kernels, dtype);
    }
  }
  return true;
}();

}  // namespace
}  // namespace switchyard::cpu
