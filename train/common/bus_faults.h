// SPDX-License-Identifier: Apache-2.0
// Explains why a process ends when a file that it has mapped is shortened.
#pragma once

namespace switchyard::train {

// From now on, touching a missing part of a mapped file prints an explanation with the name of the
// file to stderr. The process then ends by SIGBUS as before.
void explain_bus_faults();

}  // namespace switchyard::train
