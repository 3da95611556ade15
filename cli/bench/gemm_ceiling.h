// What the matrix library of this machine reaches on its own: products of 2048³.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

struct CeilingOptions {
  Dtype dtype = Dtype::f32;
  int threads = 1;     // of each rank
  int first_core = 0;  // thread i of this rank belongs on core first_core + i
};

// Whether this build has a matrix library to measure.
bool has_gemm_ceiling();

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
