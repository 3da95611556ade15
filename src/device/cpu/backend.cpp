// The CPU as a device.
#include "device/cpu/plan.h"
#include "device/cpu/rows.h"
#include "device/device_backend.h"

namespace switchyard {
namespace {

class CpuDevice final : public DeviceBackend {
 public:
  BadId count_assignments(const CountAssignments& args) const override {
    return cpu::count_assignments(args);
  }
  void assign_slots(const AssignSlots& args) const override { cpu::assign_slots(args); }
  void scatter_rows(const ScatterRows& args) const override { cpu::scatter_rows(args); }
  void gather_rows(const GatherRows& args) const override { cpu::gather_rows(args); }
  void dot_rows(const DotRows& args) const override { cpu::dot_rows(args); }
};

}  // namespace

const DeviceBackend& cpu_device() {
  static const CpuDevice device;
  return device;
}

}  // namespace switchyard
