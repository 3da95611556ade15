// SPDX-License-Identifier: Apache-2.0
// Times GPU work that ranks do together.
#pragma once

#include <functional>

#include "bench/cool_and_hot.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard::cli {

// Collective, over ranks of one host. Returns the seconds of one call of `work` on all ranks;
// `work` enqueues onto the stream of this rank's device. Times many consecutive calls, from when
// the first rank begins until the last rank's device has finished all of them.
CoolAndHot time_on_ranks(Communicator& comm, const Device& device,
                         const std::function<void()>& work);

}  // namespace switchyard::cli
