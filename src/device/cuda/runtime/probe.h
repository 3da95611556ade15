// SPDX-License-Identifier: Apache-2.0
// Queries about CUDA and its devices, and the function that makes one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/peer_memory.h"
#include "switchyard/build_info.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

std::string toolkit_version();
Feature device_feature();
std::vector<Gpu> gpus();
// Returns why a GPU cannot be used, or an empty string if it can.
std::string reason_against(int ordinal);
DeviceIdentity identity_of(int ordinal);
// Returns why a GPU cannot access the memory of one that another process uses, or an empty string
// if it can.
std::string reason_against_reaching(int ordinal, const DeviceIdentity& other);
// True if processes share the GPU through MPS.
bool is_under_mps(int ordinal);
// Throws Unsupported with the reason if the GPU cannot be used.
std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options);

}  // namespace switchyard::cuda
