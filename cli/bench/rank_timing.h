// How long GPUs take for work that ranks do together.
#pragma once

#include <functional>

#include "bench/cool_and_hot.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard::cli {

// Collective, over ranks of one host: seconds of one call of `work`, which fills the stream of this
// rank's device, on all ranks. Many calls in a row are timed, from when the first rank begins
// to when the last one's device has done all of them.
CoolAndHot time_on_ranks(Communicator& comm, const Device& device,
                         const std::function<void()>& work);

}  // namespace switchyard::cli
