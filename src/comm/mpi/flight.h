// A collective under way over MPI, and all the memory that MPI may touch until it ends.
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

  // Makes `unit` one element of so many bytes; beyond 2³¹ too, where MPI's own counts end.
  void set_unit(std::int64_t bytes);
  // The memory itself if it has an owner, who then stays. Memory without one could be gone before a
  // failed collective is, so MPI gets a copy of it.
  std::byte* borrow_for_send(const std::byte* data, std::int64_t bytes,
                             const std::shared_ptr<const void>& owner);
  std::byte* borrow_for_recv(std::byte* data, std::int64_t bytes,
                             const std::shared_ptr<const void>& owner);

  std::vector<MPI_Request> requests;
  std::vector<std::shared_ptr<const void>> memory;
  std::vector<int> send_counts, send_offsets, recv_counts, recv_offsets;
  std::vector<std::int64_t> announced, heard;
  std::int64_t largest_message = 0;  // that this rank sends, in bytes
  MPI_Datatype unit = MPI_DATATYPE_NULL;
  std::function<void()> check_first;  // run when the first request is complete
};

// MPI may write to the memory of a collective that never completed for as long as the process
// lives, and cannot be told to stop.
void keep_for_good(std::shared_ptr<const void> memory);

}  // namespace switchyard::mpi
