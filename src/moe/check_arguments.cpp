#include "moe/check_arguments.h"

#include <algorithm>
#include <cstring>

#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::int64_t kMostBytes = 512;  // of an objection that travels

}  // namespace

void require_no_objection(Communicator& comm, std::string_view operation,
                          const std::string& objection) {
  constexpr auto kWords = kMostBytes / size_of(Dtype::i32);
  Tensor own = Tensor::zeros({1, kWords}, Dtype::i32);
  const auto length = std::min(objection.size(), static_cast<std::size_t>(kMostBytes - 1));
  std::memcpy(own.data(), objection.data(), length);
  Tensor all({comm.size(), kWords}, Dtype::i32);
  comm.all_gather(own, all);
  for (int r = 0; r < comm.size(); ++r) {
    const std::string text = reinterpret_cast<const char*>(all.view().row(r));
    require(text.empty(), "{}: rank {}: {}", operation, r, text);
  }
}

}  // namespace switchyard
