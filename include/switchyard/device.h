// Where a rank computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

class DeviceBackend;

struct CpuOptions {
  int num_threads = 1;          // the calling thread is one of them
  std::vector<int> cores = {};  // thread i stays on cores[i]; thread 0 is the caller's own affair
};

// A device and the memory it keeps for reuse; copies are the same device. Shared by the layers of a
// rank, and used by one thread at a time. Results do not depend on the number of threads.
class SWITCHYARD_API Device {
 public:
  Device();  // the CPU, on the calling thread alone
  static Device cpu(const CpuOptions& options);

  int num_threads() const;
  // Memory that was taken for results and scratch, in use or kept for reuse.
  std::int64_t bytes_held() const;

  // Cuts 0 … count − 1 into pieces, calls piece(first, last) for each on the device's threads, and
  // returns when all are done; the first error is thrown here. How it is cut depends on the number
  // of threads: what is computed for one index must not depend on what comes with it. Only on CPUs.
  void parallel_for(std::int64_t count,
                    const std::function<void(std::int64_t first, std::int64_t last)>& piece) const;

  const DeviceBackend& backend() const { return *backend_; }

 private:
  explicit Device(std::shared_ptr<const DeviceBackend> backend) : backend_(std::move(backend)) {}

  std::shared_ptr<const DeviceBackend> backend_;
};

}  // namespace switchyard
