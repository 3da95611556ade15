// Products of matrices on the CPU.
#pragma once

#include <span>

#include "device/cpu/workers.h"
#include "switchyard/matmul.h"

namespace switchyard::cpu {

void multiply(std::span<const Matmul> products, Workers& workers);

}  // namespace switchyard::cpu
