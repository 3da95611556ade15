// SPDX-License-Identifier: Apache-2.0
// Heaps in host memory for ranks in several processes: anonymous files that each process maps.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/last_error.h"
#include "core/memory_cache.h"
#include "core/require.h"
#include "core/shared_pages.h"
#include "device/cpu/peer/heap.h"
#include "device/heap_space.h"

namespace switchyard::cpu {
namespace {

// The address range reserved for a heap, of which a part is mapped.
class Addresses {
 public:
  explicit Addresses(std::int64_t bytes) : bytes_(bytes) {
    void* const found = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require<DeviceError>(found != MAP_FAILED, "no addresses for a heap of {} bytes: {}", bytes,
                         last_error());
    base_ = static_cast<std::byte*>(found);
  }
  ~Addresses() { ::munmap(base_, static_cast<std::size_t>(bytes_)); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  std::byte* base() const { return base_; }
  std::int64_t bytes() const { return bytes_; }

  void map(const HeapPiece& piece) const {
    require<DeviceError>(
        0 <= piece.offset && 0 <= piece.bytes && piece.bytes <= bytes_ - piece.offset,
        "{} bytes at {} are beyond the {} bytes of a heap", piece.bytes, piece.offset, bytes_);
    const void* const mapped =
        ::mmap(base_ + piece.offset, static_cast<std::size_t>(piece.bytes), PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, piece.descriptor, 0);
    require<DeviceError>(mapped != MAP_FAILED, "mapping {} bytes of a heap: {}", piece.bytes,
                         last_error());
  }

 private:
  std::int64_t bytes_;
  std::byte* base_;
};

// Returns the size of the host's memory, but at most 1 TiB, since every rank reserves this much for
// every peer.
std::int64_t reserved_bytes_of_heap() {
  const auto of_host =
      static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  return std::min(of_host, std::int64_t{1} << 40);
}

// Unmaps nothing before it is destroyed, since peers may still access blocks that were given back.
struct SharedSpace {
  std::mutex mutex;
  Addresses addresses{reserved_bytes_of_heap()};
  HeapSpace space;
  std::function<void(const HeapPiece&)> announce;

  std::byte* take(std::int64_t bytes) {
    const std::scoped_lock lock(mutex);
    auto offset = space.take(bytes);
    if (!offset) {
      grow(bytes);
      offset = space.take(bytes);
    }
    return addresses.base() + *offset;
  }
  void give_back(const std::byte* data) {
    const std::scoped_lock lock(mutex);
    space.give_back(data - addresses.base());
  }

 private:
  void grow(std::int64_t bytes) {
    constexpr std::int64_t kStep = std::int64_t{4} << 20;
    bytes = (std::max(bytes, space.end() / 8) + kStep - 1) / kStep * kStep;
    const Descriptor file = make_shared_file(bytes);
    const HeapPiece piece{file.get(), space.end(), bytes};
    addresses.map(piece);
    announce(piece);
    space.grow(bytes);
  }
};

class SharedHeap final : public PeerHeap {
 public:
  explicit SharedHeap(std::function<void(const HeapPiece&)> announce) {
    space_->announce = std::move(announce);
  }
  std::byte* base() const override { return space_->addresses.base(); }
  std::int64_t reserved_bytes() const override { return space_->addresses.bytes(); }
  TensorView take(const Shape& shape, Dtype dtype) override {
    const std::shared_ptr<std::byte> owner(
        space_->take(size_class(shape.num_elements() * size_of(dtype))),
        [space = space_](const std::byte* data) { space->give_back(data); });
    return {owner.get(), dtype, shape, shape.row_elements(), owner};
  }
  bool holds(const ConstTensorView& view) const override {
    return base() <= view.data() && view.data() < base() + reserved_bytes();
  }
  std::int64_t bytes_held() const override {
    const std::scoped_lock lock(space_->mutex);
    return space_->space.end();
  }

 private:
  std::shared_ptr<SharedSpace> space_ = std::make_shared<SharedSpace>();
};

class HostReachedHeap final : public ReachedHeap {
 public:
  explicit HostReachedHeap(std::int64_t reserved_bytes) : addresses_(reserved_bytes) {}
  std::byte* base() const override { return addresses_.base(); }
  void map(const HeapPiece& piece) override { addresses_.map(piece); }

 private:
  Addresses addresses_;
};

}  // namespace

std::shared_ptr<PeerHeap> make_shared_heap(std::function<void(const HeapPiece&)> announce) {
  return std::make_shared<SharedHeap>(std::move(announce));
}

std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) {
  return std::make_shared<HostReachedHeap>(reserved_bytes);
}

}  // namespace switchyard::cpu
