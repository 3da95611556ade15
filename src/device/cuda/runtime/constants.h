// Small tables in a GPU's memory that are found again by what they hold.
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

// The tables used last are kept; those that a captured step used, for good.
class Constants {
 public:
  // How the streams that ask for tables follow each other.
  enum class Streams {
    in_order,  // a stream waits for the one before it, as Device::set_stream asks
    any,       // no stream waits for another; tables have memory of their own
  };
  explicit Constants(Streams streams);

  const void* find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                             CUstream_st* stream);

 private:
  // A layer asks for a dozen in a step, and all layers of a model may share a device.
  static constexpr std::size_t kMost = 4096;
  struct Table {
    std::string bytes;
    TensorView memory;
    bool is_captured = false;
    CUstream_st* stream = nullptr;              // that uploads it
    std::shared_ptr<CUevent_st> uploaded = {};  // none once that is known
  };
  // Whether work on the stream finds the table uploaded; makes the stream wait where it can.
  static bool can_use(Table& table, CUstream_st* stream, bool is_captured);
  void forget_oldest();
  void forget_half();

  class Slabs;

  Streams streams_;
  std::shared_ptr<Slabs> slabs_;  // that tables come from where streams do not wait
  std::list<Table> tables_;       // used last first
  std::size_t num_passing_ = 0;   // that no captured step used
  std::unordered_map<std::string_view, std::list<Table>::iterator> by_bytes_;
};

}  // namespace switchyard::cuda
