// Words for a process that ends because a file it had mapped was shortened.
#pragma once

namespace switchyard::train {

// From now on, touching a part of a mapped file that is gone says so, and names the file, on the
// standard error; the process then ends by SIGBUS as before.
void explain_bus_faults();

}  // namespace switchyard::train
