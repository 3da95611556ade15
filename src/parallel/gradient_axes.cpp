// SPDX-License-Identifier: Apache-2.0
#include "parallel/gradient_axes.h"

#include <array>

#include "comm/agreement.h"
#include "core/require.h"
#include "parallel/mesh_axes.h"

namespace switchyard {
namespace {

AxisRole role_of(const GradientAxes& axes, const std::string& name) {
  if (is_among(axes.pipeline, name)) return AxisRole::layers;
  if (is_among(axes.experts, name)) return AxisRole::experts;
  const bool has_tokens = is_among(axes.tokens, name);
  const bool repeats = is_among(axes.repeats, name);
  if (has_tokens && repeats) return AxisRole::named_twice;
  return has_tokens ? AxisRole::copies : repeats ? AxisRole::repeats : AxisRole::unnamed;
}

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
  for (const auto& axis : mesh.axes()) uses.push_back({axis.name, role_of(axes, axis.name)});
  return uses;
}

std::string objection_to_axes(const AxisUses& uses) {
  for (const auto& [name, role] : uses) {
    if (role == AxisRole::unnamed) {
      return fmt::format(
          "GradientAxes does not name axis \"{}\": add it to `tokens` if its ranks have tokens of "
          "their own, to `repeats` if they do the same with the same tokens, to `experts` or to "
          "`pipeline`",
          name);
    }
    if (role == AxisRole::named_twice) {
      return fmt::format(
          "GradientAxes has axis \"{}\" in `tokens` and in `repeats`: its ranks have tokens of "
          "their own, or they do the same with the same tokens",
          name);
    }
  }
  return {};
}

std::vector<std::string> texts_of(const AxisUses& uses) {
  constexpr std::array<std::string_view, 6> kRoles{"copies",  "experts", "layers",
                                                   "repeats", "nothing", "copies and repeats"};
  std::vector<std::string> texts;
  for (const auto& [name, role] : uses) {
    texts.push_back(fmt::format("{} for {}", name, kRoles.at(static_cast<std::size_t>(role))));
  }
  return texts;
}

std::vector<std::string> axes_of_same_layers(const AxisUses& uses) {
  return names_where(uses, [](AxisRole role) { return role != AxisRole::layers; });
}

std::vector<std::string> axes_to_add(const AxisUses& uses) {
  return names_where(
      uses, [](AxisRole role) { return role == AxisRole::copies || role == AxisRole::experts; });
}

std::vector<std::string> axes_to_add_experts(const AxisUses& uses) {
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
    agreement.object(objection_to_axes(uses));
    agreement.gather();
    agreement.require_equal();
    for (const auto& axes :
         {axes_of_same_layers(uses), axes_to_add(uses), axes_to_add_experts(uses)}) {
      if (num_ranks_along(mesh, axes) > 1) mesh.comm(axes);
    }
    known.insert(uses);
  }
  last = uses;
}

}  // namespace switchyard
