// What is known of CUDA and its devices, and the way to one of them.
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
// Why a GPU cannot be used; empty if it can.
std::string reason_against(int ordinal);
DeviceIdentity identity_of(int ordinal);
// Why a GPU cannot reach the memory of one that another process uses; empty if it can.
std::string reason_against_reaching(int ordinal, const DeviceIdentity& other);
// Whether processes share a GPU by way of MPS.
bool is_under_mps(int ordinal);
// Throws Unsupported with that reason.
std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options);

}  // namespace switchyard::cuda
