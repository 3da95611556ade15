// SPDX-License-Identifier: Apache-2.0
// A cache of small tables in GPU memory, looked up by their contents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "device/cuda/runtime/device_memory.h"

struct CUevent_st;

namespace switchyard::cuda {

// Keeps the most recently used tables, and keeps those that a captured step used for good.
class Constants {
 public:
  // How the streams that ask for tables are ordered.
  enum class Streams {
    in_order,  // each stream waits for the previous one, as Device::set_stream requires
    any,       // streams do not wait for each other; tables have memory of their own
  };
  explicit Constants(Streams streams);

  const void* find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                             CUstream_st* stream);

 private:
  // A layer asks for about a dozen tables per step, and all layers of a model may share a device.
  static constexpr std::size_t kMost = 4096;
  struct Table {
    std::string bytes;
    TensorView memory;
    bool is_captured = false;
    CUstream_st* stream = nullptr;              // the stream that uploads it
    std::shared_ptr<CUevent_st> uploaded = {};  // null if nobody has to wait for the upload
  };
  // True if work on the stream will find the table uploaded. Makes the stream wait for the upload
  // if needed; a stream that is being captured cannot wait.
  static bool can_use(Table& table, CUstream_st* stream, bool is_captured);
  void forget_oldest();
  void forget_half();

  class Slabs;

  Streams streams_;
  std::shared_ptr<Slabs> slabs_;  // memory for the tables with Streams::any, otherwise null
  std::list<Table> tables_;       // most recently used first
  std::size_t num_passing_ = 0;   // tables that no captured step uses
  std::unordered_map<std::string_view, std::list<Table>::iterator> by_bytes_;
};

}  // namespace switchyard::cuda
