// Ceilings of this machine: the bandwidth and matrix products its CPUs reach outside the library.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

// Memory: passes that read and write as many rows as an operation does, but one after the other.
// from [n, H] is read once, and each row is written to K places of to [n · K, H], in K streams.
void one_read_many_writes(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);
// K streams of from [n · K, H] are read and added; to [n, H] is written once.
void many_reads_one_write(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);

struct CeilingOptions {
  Dtype dtype = Dtype::f32;
  int threads = 1;     // of each rank
  int first_core = 0;  // thread i of this rank belongs on core first_core + i
};

// Whether this build has a matrix library to measure.
bool has_gemm_ceiling();

// The matrix library: products of 2048³.
class GemmCeiling {
 public:
  explicit GemmCeiling(const CeilingOptions& options);
  ~GemmCeiling();

  // Collective: GFLOP/s over all ranks, every thread of every rank with a product of its own.
  double independent(Communicator& comm);
  // Collective: GFLOP/s of one product at a time by as many threads of the library's own, on rank 0
  // while the others wait.
  double threaded(Communicator& comm);

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace switchyard::cli
