# SPDX-License-Identifier: Apache-2.0
"""The experts' activations, as the library numbers them."""
import enum


class Activation(enum.IntEnum):
    """The function applied to an expert's first products, gate g and up u. `limit`, `alpha` and
    `offset` are constants of the experts."""

    SWIGLU = 0  # silu(g) · u
    CLAMPED_SWIGLU = 1  # g · sigmoid(alpha · g) · (u + offset), g at most limit, |u| at most limit
    LIMITED_SWIGLU = 2  # min(silu(g), limit) · u, |u| at most limit
    GEGLU = 3  # gelu(g) · u
    GEGLU_TANH = 4
    REGLU = 5  # relu(g) · u
    GELU = 6  # a function of u alone, like the next four
    GELU_TANH = 7
    RELU = 8
    RELU2 = 9  # relu(u)²
    SILU = 10

    @property
    def has_gate(self):
        return self <= Activation.REGLU


# The limit, alpha and offset of gpt-oss, for CLAMPED_SWIGLU and LIMITED_SWIGLU.
DEFAULT_CONSTANTS = (7.0, 1.702, 1.0)
