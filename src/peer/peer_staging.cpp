// SPDX-License-Identifier: Apache-2.0
// All ranks meet before any of them writes to a buffer, and before any of them reads what others
// wrote. No meeting follows a read: the next meeting implies that it is done.
#include "peer/peer_staging.h"

#include <algorithm>
#include <numeric>

#include "comm/agreement.h"
#include "core/hash.h"

namespace switchyard {
namespace {

// One warp segment of the kernels that move rows.
constexpr std::int64_t kRowBytes = 2048;

std::int64_t row_elements(Dtype dtype) { return kRowBytes / size_of(dtype); }
std::int64_t rows_for(std::int64_t elements, Dtype dtype) {
  return (elements + row_elements(dtype) - 1) / row_elements(dtype);
}

enum class Operation : std::int64_t { gather, scatter, reduce };

// Hashes the arguments that all ranks must agree on into the 24 bits that a meeting compares.
std::uint32_t detail_of(Operation operation, Dtype dtype, std::vector<std::int64_t> sizes) {
  sizes.push_back(static_cast<std::int64_t>(operation));
  sizes.push_back(static_cast<std::int64_t>(dtype));
  const auto hash = static_cast<std::uint64_t>(hash_of(std::span<const std::int64_t>(sizes)));
  return static_cast<std::uint32_t>((hash ^ hash >> 24U ^ hash >> 48U) & 0xffffffU);
}

template <typename View>
std::vector<Elements<View>> elements_of(std::span<const std::vector<View>> views) {
  std::vector<Elements<View>> result;
  for (const auto& list : views) result.emplace_back(list);
  return result;
}

template <typename View>
std::vector<std::int64_t> counts_of(std::span<const Elements<View>> lists) {
  std::vector<std::int64_t> counts;
  for (const auto& list : lists) counts.push_back(list.count());
  return counts;
}

// Returns how many of `count` elements are in a piece that begins at `first` and holds at most
// `most`.
std::int64_t count_in(std::int64_t count, std::int64_t first, std::int64_t most) {
  return std::clamp<std::int64_t>(count - first, 0, most);
}

}  // namespace

PeerStaging::PeerStaging(Communicator& comm, const Device& device, std::int64_t bytes)
    : meetings_(PeerMemory::of(comm, device), 0),
      rank_(comm.rank()),
      num_ranks_(comm.size()),
      rows_each_(std::max<std::int64_t>(1, bytes / kRowBytes / comm.size())) {
  // Takes the memory that calls will need now. Allocating during a call might wait for all devices,
  // and so block the host of a rank that another device is waiting for.
  agree(comm, "peer memory", [&] {
    make_tables();
    (void)take_buffer(Dtype::f32);
    (void)take_rows(rows_each_, Dtype::f32);
    device.synchronize();
  });
}

void PeerStaging::make_tables() {
  Tensor slots({num_ranks_ * rows_each_, num_ranks_}, Dtype::i32);
  Tensor buffers({rows_each_, num_ranks_}, Dtype::i32);
  for (std::int64_t r = 0; r < slots.rows(); ++r) {
    std::ranges::fill(slots.view().slice(r, r + 1).span<std::int32_t>(),
                      static_cast<std::int32_t>(r));
  }
  for (std::int64_t r = 0; r < rows_each_; ++r) {
    const auto row = buffers.view().slice(r, r + 1).span<std::int32_t>();
    std::iota(row.begin(), row.end(), 0);
  }
  slots_ = device().copy_of(slots);
  buffers_ = device().copy_of(buffers);
}

TensorView PeerStaging::take_buffer(Dtype dtype) const {
  return meetings_.memory().take({num_ranks_ * rows_each_, row_elements(dtype)}, dtype);
}

TensorView PeerStaging::take_rows(std::int64_t rows, Dtype dtype) const {
  return backend().take({rows, row_elements(dtype)}, dtype);
}

RowTable PeerStaging::table(std::int64_t count, std::int64_t first_row,
                            const TensorView& lent) const {
  const auto* slots = reinterpret_cast<const std::int32_t*>(slots_.data());
  return {.count = count,
          .width = num_ranks_,
          .slots = slots + first_row * num_ranks_,
          .buffers = reinterpret_cast<const std::int32_t*>(buffers_.data()),
          .bases = {},
          .peer_bases = bases_of(lent, 0)};
}

void PeerStaging::spread(const TensorView& rows, std::int64_t first_row,
                         const TensorView& lent) const {
  if (rows.rows() == 0) return;
  // Rows of any dtype travel as f32 words, which every device can move.
  constexpr std::int64_t kWords = kRowBytes / size_of(Dtype::f32);
  const ConstTensorView words(rows.data(), Dtype::f32, {rows.rows(), kWords}, kWords, rows.owner(),
                              rows.memory());
  backend().scatter_rows({.from = words, .to = table(rows.rows(), first_row, lent)});
}

void PeerStaging::add_up(const TensorView& rows, std::int64_t first_row,
                         const TensorView& lent) const {
  if (rows.rows() == 0) return;
  backend().gather_rows({.from = table(rows.rows(), first_row, lent), .to = rows});
}

// Makes the staged values NaN if a meeting failed, and with them the results copied from there.
void PeerStaging::spoil_if_failed(const TensorView& staged) const {
  if (adds(staged.dtype())) backend().spoil(meetings_.memory().failed(), {&staged, 1});
}

void PeerStaging::all_gather(const ConstTensorView& own,
                             std::span<const std::vector<TensorView>> all) const {
  meetings_.check();
  const Dtype dtype = own.dtype();
  const Elements<ConstTensorView> mine({&own, 1});
  const auto lists = elements_of(all);
  const auto counts = counts_of<TensorView>(lists);
  const auto detail = detail_of(Operation::gather, dtype, counts);
  const TensorView buffer = take_buffer(dtype);
  const TensorView rows = take_rows(rows_each_, dtype);
  const std::int64_t most = rows_each_ * row_elements(dtype);
  for (std::int64_t first = 0; first < *std::ranges::max_element(counts); first += most) {
    const TensorView lent = meetings_.lend({&buffer, 1}, detail);
    const auto own_count = count_in(mine.count(), first, most);
    mine.read(backend(), first, own_count, rows);
    spread(rows.slice(0, rows_for(own_count, dtype)), rank_ * rows_each_, lent);
    meetings_.finish({}, detail);
    spoil_if_failed(buffer);
    for (std::size_t r = 0; r < lists.size(); ++r) {
      const auto begin = static_cast<std::int64_t>(r) * rows_each_;
      lists[r].write(backend(), first, count_in(counts[r], first, most),
                     buffer.slice(begin, begin + rows_each_));
    }
  }
}

void PeerStaging::reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                                 const TensorView& sum) const {
  meetings_.check();
  const Dtype dtype = sum.dtype();
  const Elements<TensorView> mine({&sum, 1});
  const auto lists = elements_of(parts);
  const auto counts = counts_of<ConstTensorView>(lists);
  const auto detail = detail_of(Operation::scatter, dtype, counts);
  const TensorView buffer = take_buffer(dtype);
  const TensorView rows = take_rows(rows_each_, dtype);
  const std::int64_t most = rows_each_ * row_elements(dtype);
  for (std::int64_t first = 0; first < *std::ranges::max_element(counts); first += most) {
    meetings_.close();
    for (std::size_t r = 0; r < lists.size(); ++r) {
      const auto begin = static_cast<std::int64_t>(r) * rows_each_;
      lists[r].read(backend(), first, count_in(counts[r], first, most),
                    buffer.slice(begin, begin + rows_each_));
    }
    const TensorView lent = meetings_.lend({&buffer, 1}, detail);
    const auto own_count = count_in(mine.count(), first, most);
    add_up(rows.slice(0, rows_for(own_count, dtype)), rank_ * rows_each_, lent);
    spoil_if_failed(rows);
    mine.write(backend(), first, own_count, rows);
  }
}

// Every rank sums its share of the rows, which it alone reads, and writes the sums over the terms.
// So no meeting is needed in between.
void PeerStaging::all_reduce(std::span<const TensorView> values) const {
  meetings_.check();
  const Elements<TensorView> all(values);
  if (all.count() == 0) return;
  const Dtype dtype = values.front().dtype();
  const auto detail = detail_of(Operation::reduce, dtype, {all.count()});
  const TensorView buffer = take_buffer(dtype);
  const TensorView rows = take_rows(rows_each_, dtype);
  const std::int64_t most = num_ranks_ * rows_each_ * row_elements(dtype);
  meetings_.close();
  for (std::int64_t first = 0; first < all.count(); first += most) {
    const auto count = count_in(all.count(), first, most);
    all.read(backend(), first, count, buffer);
    const TensorView lent = meetings_.lend({&buffer, 1}, detail);
    const auto num_rows = rows_for(count, dtype);
    const auto share = (num_rows + num_ranks_ - 1) / num_ranks_;
    const auto own_first = std::min(rank_ * share, num_rows);
    const TensorView own = rows.slice(0, count_in(num_rows, own_first, share));
    add_up(own, own_first, lent);
    spread(own, own_first, lent);
    meetings_.finish({}, detail);
    spoil_if_failed(buffer);
    all.write(backend(), first, count, buffer);
  }
}

}  // namespace switchyard
