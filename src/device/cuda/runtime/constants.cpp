#include "device/cuda/runtime/constants.h"

#include <cuda_runtime_api.h>

#include "device/cuda/kernels.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

// Lets this thread make calls that CUDA refuses while a graph is captured, and that do not disturb
// the capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A graph may run at any time: memory that its steps share with others must be nobody else's.
TensorView take_for_good(std::int64_t words) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<std::size_t>(4 * words)), "taking memory for a table");
  const std::shared_ptr<std::byte> owner(static_cast<std::byte*>(data),
                                         [](std::byte* memory) { cudaFree(memory); });
  return {owner.get(), Dtype::i32, {words}, 1, owner, Memory::gpu};
}

std::shared_ptr<CUevent_st> event_on(CUstream_st* stream) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  std::shared_ptr<CUevent_st> owner(event, [](cudaEvent_t old) { cudaEventDestroy(old); });
  check(cudaEventRecord(event, stream), "recording an event");
  return owner;
}

}  // namespace

bool Constants::can_use(Table& table, CUstream_st* stream, bool is_captured) {
  if (table.uploaded == nullptr || table.stream == stream) return true;
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(table.uploaded.get());
  if (status == cudaSuccess) {
    table.uploaded = nullptr;
    return true;
  }
  cudaGetLastError();
  if (is_captured) return false;
  check(cudaStreamWaitEvent(stream, table.uploaded.get()), "waiting for a table");
  return true;
}

const void* Constants::find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                                      CUstream_st* stream) {
  const std::string_view wanted(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const bool is_captured = capture_of(stream) != 0;
  const auto found = by_bytes_.find(wanted);
  if (found != by_bytes_.end() && can_use(*found->second, stream, is_captured)) {
    tables_.splice(tables_.begin(), tables_, found->second);
    if (is_captured && !tables_.front().is_captured) {
      tables_.front().is_captured = true;
      --num_passing_;
    }
    return tables_.front().memory.data();
  }
  const auto words = (static_cast<std::int64_t>(bytes.size()) + 3) / 4;
  tables_.push_front(
      {std::string(wanted), take(words, memory, stream, is_captured), is_captured, stream});
  upload_words(bytes, tables_.front().memory.data(), stream);
  // What is uploaded within a graph is there only while that is replayed: no one else may find it.
  if (!is_captured) {
    if (streams_ == Streams::any) tables_.front().uploaded = event_on(stream);
    by_bytes_.emplace(tables_.front().bytes, tables_.begin());
    ++num_passing_;
    forget_oldest();
  }
  return tables_.front().memory.data();
}

TensorView Constants::take(std::int64_t words, DeviceMemory& memory, CUstream_st* stream,
                           bool is_captured) {
  if (is_captured && streams_ == Streams::any) return take_for_good(words);
  return memory.take_to_keep({words}, Dtype::i32, stream);
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
