// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/flight.h"

#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "comm/mpi/errors.h"

namespace switchyard::mpi {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 30;

// MPI counts in int, so a long range of bytes becomes blocks of 1 GiB and a remainder.
MPI_Datatype make_bytes_type(std::int64_t bytes) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  if (bytes <= kBlock) {
    check_call(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type),
               "MPI_Type_contiguous");
  } else {
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check_call(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block),
               "MPI_Type_contiguous");
    const std::array<int, 2> lengths{static_cast<int>(bytes / kBlock),
                                     static_cast<int>(bytes % kBlock)};
    const std::array<MPI_Aint, 2> offsets{0, bytes / kBlock * kBlock};
    const std::array<MPI_Datatype, 2> types{block, MPI_BYTE};
    check_call(MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type),
               "MPI_Type_create_struct");
    check_call(MPI_Type_free(&block), "MPI_Type_free");
  }
  check_call(MPI_Type_commit(&type), "MPI_Type_commit");
  return type;
}

}  // namespace

Flight::~Flight() {
  if (unit != MPI_DATATYPE_NULL) MPI_Type_free(&unit);
}

void Flight::set_unit(std::int64_t bytes) { unit = make_bytes_type(bytes); }

std::byte* Flight::borrow_for_send(const std::byte* data, std::int64_t bytes,
                                   const std::shared_ptr<const void>& owner) {
  if (owner) {
    memory.push_back(owner);
    return const_cast<std::byte*>(data);
  }
  std::byte* staged = borrow_for_recv(nullptr, bytes, nullptr);
  if (bytes > 0) std::memcpy(staged, data, static_cast<std::size_t>(bytes));
  return staged;
}

std::byte* Flight::borrow_for_recv(std::byte* data, std::int64_t bytes,
                                   const std::shared_ptr<const void>& owner) {
  if (owner) {
    memory.push_back(owner);
    return data;
  }
  const std::shared_ptr<std::byte[]> staged(new std::byte[static_cast<std::size_t>(bytes)]);
  memory.push_back(staged);
  return staged.get();
}

void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<const void>>();
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace switchyard::mpi
