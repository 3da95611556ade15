"""The experts' activations, as the library numbers them."""
import enum


class Activation(enum.IntEnum):
    """What becomes of an expert's first products, gate g and up u; `limit`, `alpha` and `offset`
    are constants of the experts."""

    SWIGLU = 0  # silu(g) · u
    CLAMPED_SWIGLU = 1  # g · sigmoid(alpha · g) · (u + offset), g at most limit, |u| at most limit
    GELU = 2  # of u alone, as the next three
    GELU_TANH = 3
    RELU = 4
    SILU = 5
    LIMITED_SWIGLU = 6  # min(silu(g), limit) · u, |u| at most limit
    GEGLU = 7  # gelu(g) · u
    GEGLU_TANH = 8
    REGLU = 9  # relu(g) · u
    RELU2 = 10  # relu(u)², of u alone

    @property
    def has_gate(self):
        return self not in _WITHOUT_GATE


_WITHOUT_GATE = {Activation.GELU, Activation.GELU_TANH, Activation.RELU, Activation.SILU,
                 Activation.RELU2}
