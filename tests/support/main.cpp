// SPDX-License-Identifier: Apache-2.0
// Test main. Under mpirun it joins the world before the tests and leaves it afterwards.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "support/ranks.h"
#include "switchyard/communicator.h"

int main(int argc, char** argv) {
  if (!switchyard::testing::under_mpirun()) {  // thread ranks wait for each other
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  }
  ::testing::InitGoogleTest(&argc, argv);
  std::unique_ptr<switchyard::Communicator> world;
  if (switchyard::testing::under_mpirun()) {
    world = switchyard::connect({.backend = "mpi", .timeout = switchyard::testing::kTestTimeout});
    switchyard::testing::set_mpi_world(world.get());
    if (world->rank() != 0) {  // one report is enough, but print the failures of every rank
      auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
      delete listeners.Release(listeners.default_result_printer());
      class Failures : public ::testing::EmptyTestEventListener {
        void OnTestPartResult(const ::testing::TestPartResult& result) override {
          if (result.failed()) {
            fprintf(stderr, "%s:%d: %s\n", result.file_name(), result.line_number(),
                    result.message());
          }
        }
      };
      listeners.Append(new Failures());
    }
  }
  return RUN_ALL_TESTS();
}
