#include "parallel/gradient_axes.h"

#include <array>

#include "comm/agreement.h"
#include "core/require.h"
#include "parallel/mesh_axes.h"

namespace switchyard {
namespace {

std::vector<std::string> names_where(const AxisUses& uses, auto predicate) {
  std::vector<std::string> names;
  for (const auto& use : uses) {
    if (predicate(use.role)) names.push_back(use.name);
  }
  return names;
}

}  // namespace

AxisUses uses_of(const Mesh& mesh, const GradientAxes& axes) {
  AxisUses uses;
  for (const auto& axis : mesh.axes()) {
    const auto role = is_among(axes.pipeline, axis.name)  ? AxisRole::layers
                      : is_among(axes.experts, axis.name) ? AxisRole::experts
                                                          : AxisRole::copies;
    uses.push_back({axis.name, role});
  }
  return uses;
}

std::vector<std::string> texts_of(const AxisUses& uses) {
  constexpr std::array<std::string_view, 3> kRoles{"copies", "experts", "layers"};
  std::vector<std::string> texts;
  for (const auto& [name, role] : uses) {
    texts.push_back(fmt::format("{} for {}", name, kRoles.at(static_cast<std::size_t>(role))));
  }
  return texts;
}

std::vector<std::string> axes_of_same_layers(const AxisUses& uses) {
  return names_where(uses, [](AxisRole role) { return role != AxisRole::layers; });
}

std::vector<std::string> axes_of_same_experts(const AxisUses& uses) {
  return names_where(uses, [](AxisRole role) { return role == AxisRole::copies; });
}

AgreedAxes& AgreedAxes::of(Mesh& mesh) {
  if (!mesh.agreed_axes_) mesh.agreed_axes_ = std::make_shared<AgreedAxes>();
  return *mesh.agreed_axes_;
}

void AgreedAxes::agree(std::string_view operation, Mesh& mesh, const AxisUses& uses) {
  if (!known.contains(uses)) {
    const auto texts = texts_of(uses);
    Agreement agreement(mesh.world(), operation);
    agreement.add(list_of("axes", "axis", texts));
    agreement.gather();
    agreement.require_equal();
    for (const auto& axes : {axes_of_same_layers(uses), axes_of_same_experts(uses)}) {
      if (num_ranks_along(mesh, axes) > 1) mesh.comm(axes);
    }
    known.insert(uses);
  }
  last = uses;
}

}  // namespace switchyard
