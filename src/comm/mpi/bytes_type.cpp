// MPI counts in int: a long stretch of bytes is blocks of a gibibyte and a rest.
#include "comm/mpi/bytes_type.h"

#include <array>

namespace switchyard::mpi {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 30;

}  // namespace

MPI_Datatype make_bytes_type(std::int64_t bytes) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  if (bytes <= kBlock) {
    MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type);
  } else {
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block);
    const std::array<int, 2> lengths{static_cast<int>(bytes / kBlock),
                                     static_cast<int>(bytes % kBlock)};
    const std::array<MPI_Aint, 2> offsets{0, bytes / kBlock * kBlock};
    const std::array<MPI_Datatype, 2> types{block, MPI_BYTE};
    MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type);
    MPI_Type_free(&block);
  }
  MPI_Type_commit(&type);
  return type;
}

}  // namespace switchyard::mpi
