// SPDX-License-Identifier: Apache-2.0
// Ceilings of this machine: the memory bandwidth and the speed of matrix products that its CPUs
// reach outside the library.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

// Memory passes that read and write as many rows as an operation does, but sequentially.
// Reads `from` [n, H] once and writes each row to K places of `to` [n · K, H], in K streams.
void one_read_many_writes(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);
// Reads and adds K streams of `from` [n · K, H], and writes `to` [n, H] once.
void many_reads_one_write(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);

struct CeilingOptions {
  Dtype dtype = Dtype::f32;
  int threads = 1;     // per rank
  int first_core = 0;  // thread i of this rank is pinned to core first_core + i
};

// True if this build has a matrix library to measure.
bool has_gemm_ceiling();

// The speed of the matrix library, for products of 2048³ in the dtype, or in f32 if that is bf16
// and the CPU has no bf16 units, because the library then computes in f32 too.
class GemmCeiling {
 public:
  explicit GemmCeiling(const CeilingOptions& options);
  ~GemmCeiling();

  // Collective. Returns GFLOP/s over all ranks, where every thread of every rank computes a product
  // of its own.
  double independent(Communicator& comm);
  // Collective. Returns GFLOP/s of one product at a time, on rank 0 while the others wait. The
  // matrix library uses as many threads as all ranks have together.
  double threaded(Communicator& comm);

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace switchyard::cli
