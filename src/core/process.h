// SPDX-License-Identifier: Apache-2.0
// Tells a forked child from its parent, which keeps its threads and its place in groups of ranks.
#pragma once

namespace switchyard {

// Returns how many forks lie between this process and the first one that called this function. A
// child's value differs from its parent's. Costs one atomic load.
int fork_generation();

}  // namespace switchyard
