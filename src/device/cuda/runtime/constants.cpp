#include "device/cuda/runtime/constants.h"

#include "device/cuda/kernels.h"

namespace switchyard::cuda {

const void* Constants::find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                                      CUstream_st* stream) {
  const std::string_view wanted(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const bool is_captured = capture_of(stream) != 0;
  if (const auto found = by_bytes_.find(wanted); found != by_bytes_.end()) {
    tables_.splice(tables_.begin(), tables_, found->second);
    if (is_captured && !tables_.front().is_captured) {
      tables_.front().is_captured = true;
      --num_passing_;
    }
    return tables_.front().memory.data();
  }
  const auto size = static_cast<std::int64_t>(bytes.size());
  tables_.push_front({std::string(wanted),
                      memory.take_to_keep({(size + 3) / 4}, Dtype::i32, stream), is_captured});
  upload_words(bytes, tables_.front().memory.data(), stream);
  // What is uploaded within a graph is there only while that is replayed: no one else may find it.
  if (!is_captured) {
    by_bytes_.emplace(tables_.front().bytes, tables_.begin());
    ++num_passing_;
    forget_oldest();
  }
  return tables_.front().memory.data();
}

// Of those that pass, so that tables which a function has just asked for are never among them.
void Constants::forget_oldest() {
  if (num_passing_ <= kMost) return;
  for (auto i = std::prev(tables_.end()); i != tables_.begin(); --i) {
    if (i->is_captured) continue;
    by_bytes_.erase(i->bytes);
    tables_.erase(i);
    --num_passing_;
    return;
  }
}

}  // namespace switchyard::cuda
