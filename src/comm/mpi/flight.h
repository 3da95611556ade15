// SPDX-License-Identifier: Apache-2.0
// An MPI collective in flight, and all the memory that MPI may touch until it ends.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace switchyard::mpi {

struct Flight {
  explicit Flight(std::size_t num_requests) : requests(num_requests, MPI_REQUEST_NULL) {}
  ~Flight();
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // Makes `unit` one element of `bytes` bytes, which may exceed the 2³¹ limit of MPI's own counts.
  void set_unit(std::int64_t bytes);
  // Returns the memory itself if it has an owner, and keeps the owner alive. Memory without one
  // could be freed before a failed collective ends, so MPI gets a staging buffer instead.
  std::byte* borrow_for_send(const std::byte* data, std::int64_t bytes,
                             const std::shared_ptr<const void>& owner);
  std::byte* borrow_for_recv(std::byte* data, std::int64_t bytes,
                             const std::shared_ptr<const void>& owner);

  std::vector<MPI_Request> requests;
  std::vector<std::shared_ptr<const void>> memory;
  std::vector<int> send_counts, send_offsets, recv_counts, recv_offsets;
  std::vector<std::int64_t> announced, heard;
  std::int64_t largest_message = 0;  // largest message that this rank sends, in bytes
  MPI_Datatype unit = MPI_DATATYPE_NULL;
  std::function<void()> check_first;  // runs when the first request is complete
};

// Keeps the memory until the process ends: MPI may write to the memory of a collective that never
// completed, and cannot be told to stop.
void keep_for_good(std::shared_ptr<const void> memory);

}  // namespace switchyard::mpi
