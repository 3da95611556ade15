// Small tables in a GPU's memory that are found again by what they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "device/cuda/runtime/device_memory.h"

namespace switchyard::cuda {

// The tables used last are kept; those that a captured step used, for good.
class Constants {
 public:
  const void* find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                             CUstream_st* stream);

 private:
  // A layer asks for a dozen in a step, and all layers of a model may share a device.
  static constexpr std::size_t kMost = 4096;
  struct Table {
    std::string bytes;
    TensorView memory;
    bool is_captured = false;
  };
  void forget_oldest();

  std::list<Table> tables_;      // used last first
  std::size_t num_passing_ = 0;  // that no captured step used
  std::unordered_map<std::string_view, std::list<Table>::iterator> by_bytes_;
};

}  // namespace switchyard::cuda
