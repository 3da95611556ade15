// SPDX-License-Identifier: Apache-2.0
// Every activation, and clamped_swiglu with the parameters of several models.
#pragma once

#include <array>
#include <ostream>
#include <string>

#include "switchyard/experts.h"

namespace switchyard::testing {

struct ActivationForm {
  Activation activation = Activation::swiglu;
  float gate_alpha = 1.702F;
  float up_offset = 1.0F;

  // Returns options of experts or of a layer with this form set.
  template <typename Options>
  Options in(Options options) const {
    options.activation = activation;
    options.gate_alpha = gate_alpha;
    options.up_offset = up_offset;
    if constexpr (requires { options.shared_activation; }) options.shared_activation = activation;
    return options;
  }
};

inline constexpr std::array kActivationForms{
    ActivationForm{Activation::swiglu},
    ActivationForm{Activation::clamped_swiglu},
    ActivationForm{Activation::clamped_swiglu, 1.0F, 0.0F},    // DeepSeek-V4
    ActivationForm{Activation::clamped_swiglu, 0.6F, -0.25F},  // no model; far from the others
    ActivationForm{Activation::limited_swiglu},
    ActivationForm{Activation::geglu},
    ActivationForm{Activation::geglu_tanh},
    ActivationForm{Activation::reglu},
    ActivationForm{Activation::gelu},
    ActivationForm{Activation::gelu_tanh},
    ActivationForm{Activation::relu},
    ActivationForm{Activation::relu2},
    ActivationForm{Activation::silu}};

inline std::string name_of(const ActivationForm& form) {
  std::string name(switchyard::name_of(form.activation));
  if (form.gate_alpha == ActivationForm{}.gate_alpha) return name;
  return name + (form.up_offset == 0.0F ? "_of_deepseek" : "_of_no_model");
}
inline void PrintTo(const ActivationForm& form, std::ostream* out) { *out << name_of(form); }

}  // namespace switchyard::testing
