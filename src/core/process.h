// Tells a process from the one that it was forked from, which keeps threads and shared memory.
#pragma once

namespace switchyard {

// How often this process was forked off since the program began: it differs from that of its
// parent. Costs a read.
int fork_generation();

}  // namespace switchyard
