# SPDX-License-Identifier: Apache-2.0
"""The experts implementation "switchyard" of Hugging Face transformers."""
import copy
import functools
import math
import types
import warnings
import weakref

import torch
from torch.distributed.tensor import DTensor

from .._activations import DEFAULT_CONSTANTS, Activation
from .._library import Unsupported
from ._functions import moe, plan

NAME = "switchyard"


class FallbackWarning(UserWarning):
    """Issued when experts that Switchyard cannot run use grouped_mm instead. The text says why."""


def register():
    """Registers experts_implementation="switchyard" with transformers, if that is installed."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return
    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """Returns y [T, H] of the experts of a transformers module, for hidden_states [T, H] and picks
    [T, K].

    Ids equal to the number of experts are no pick, unless module._is_expert_parallel is False.
    """
    dtype = _compute_dtype(hidden_states.device.type, module.down_proj.dtype)
    form = _form_of(module)
    reason = _reason_against(module, form, dtype, hidden_states)
    if reason is not None:
        return _fall_back(reason, type(module), module, hidden_states, top_k_index, top_k_weights)
    picks = plan(top_k_index, module.down_proj.shape[0],
                 sentinels=bool(getattr(module, "_is_expert_parallel", True)))
    return _run(moe, picks, module, form, dtype, hidden_states, top_k_weights)


def parallel_experts_forward(experts, module, hidden_states, top_k_index, top_k_weights):
    """Like experts_forward(), for experts that an ExpertParallel divides over ranks. Ids are those
    of all experts, and the module's parameters are this rank's part, or DTensors with such a
    part."""
    dtype = _compute_dtype(hidden_states.device.type, module.down_proj.dtype)
    form = _form_of(module)
    reason = _reason_against(module, form, dtype, hidden_states)
    if reason is not None:
        experts.abort(f"{type(module).__name__}: {reason}")
        raise Unsupported(f"{type(module).__name__} cannot be divided over ranks: {reason}")
    return _run(experts.moe, experts.plan(top_k_index), module, form, dtype, hidden_states,
                top_k_weights)


def _run(function, picks, module, form, dtype, hidden_states, top_k_weights):
    """Calls moe() with a module's weights in the form that it expects."""
    has_gate = getattr(module, "has_gate", True)
    gate_up = local(module.gate_up_proj if has_gate else module.up_proj)
    down = local(module.down_proj)
    gate_up_bias, down_bias = None, None
    if getattr(module, "has_bias", False):
        gate_up_bias = local(module.gate_up_proj_bias if has_gate else module.up_proj_bias)
        down_bias = local(module.down_proj_bias)
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if has_gate and not getattr(module, "is_concatenated", True):
        gate_up = _gates_first(gate_up)
        gate_up_bias = None if gate_up_bias is None else _gates_first(gate_up_bias)
    gate_up, down, gate_up_bias, down_bias = (
        None if w is None else w.to(dtype) for w in (gate_up, down, gate_up_bias, down_bias))
    activation, constants = form
    y = function(picks, hidden_states.to(dtype), top_k_weights, gate_up, down, gate_up_bias,
                 down_bias, activation=activation, constants=constants)
    return y.to(hidden_states.dtype)


def local(parameter):
    """Returns this rank's part of a DTensor, and anything else unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _gates_first(weights):
    """Reorders rows gate 0, up 0, gate 1, up 1, … of weights [E, 2I, …] to all gates, then all
    ups."""
    pairs = weights.unflatten(1, (-1, 2))
    return pairs.transpose(1, 2).flatten(1, 2)


def _compute_dtype(device_type, weight_dtype):
    """Returns the weights' dtype, or autocast's if that casts them."""
    if weight_dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight_dtype


def _reason_against(module, form, dtype, hidden_states):
    """Returns why Switchyard cannot run these experts, or None if it can."""
    if form is None:
        return "Switchyard does not know its activation"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises the outputs of its experts"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in {dtype}, but Switchyard only in float32 or bfloat16"
    if hidden_states.device.type not in ("cpu", "cuda", "meta"):
        return f"it is on {hidden_states.device.type}, but Switchyard only on CPUs and CUDA GPUs"
    return None


def _fall_back(reason, kind, *arguments):
    _warn_once(kind.__name__, reason)
    from transformers.integrations.moe import grouped_mm_experts_forward
    return grouped_mm_experts_forward(*arguments)


@torch._dynamo.assume_constant_result
def _warn_once(name, reason):
    _warn(name, reason)
    return True


@functools.lru_cache(maxsize=None)
def _warn(name, reason):
    warnings.warn(f"{name} runs with grouped_mm, not with Switchyard: {reason}", FallbackWarning,
                  stacklevel=2)


# The rest finds out which activation a module has: transformers lets every model write its own.

# Whether torch.compile can pass a module to a function whose result it treats as constant. Older
# versions can pass only classes, so there the activation is constructed anew from its class.
_COMPILES_MODULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_forms = weakref.WeakKeyDictionary()  # by module: its constants, and the form found for them


def _form_of(module):
    """Returns (activation, constants) of a module, or None if the library has no such
    activation."""
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    if _COMPILES_MODULES or not torch.compiler.is_compiling():
        return _form_of_module(module, limit, alpha)
    act_fn = getattr(module, "act_fn", None)
    act_class = type(act_fn) if isinstance(act_fn, torch.nn.Module) else None
    return _form_of_class(type(module), act_class, None if act_class else act_fn,
                          getattr(module, "has_gate", True),
                          getattr(module, "is_concatenated", True), limit, alpha)


@torch._dynamo.assume_constant_result
def _form_of_module(module, limit, alpha):
    known = _forms.get(module)
    if known is None or known[0] != (limit, alpha):
        act_fn = getattr(module, "act_fn", None)
        if isinstance(act_fn, torch.nn.Module):
            act_fn = copy.deepcopy(act_fn).to("cpu", torch.float64)
        form = _recognise(type(module), act_fn, getattr(module, "has_gate", True),
                          getattr(module, "is_concatenated", True), limit, alpha)
        known = _forms[module] = (limit, alpha), form
    return known[1]


@torch._dynamo.assume_constant_result
def _form_of_class(experts_class, act_class, act_fn, has_gate, is_concatenated, limit, alpha):
    try:
        act_fn = act_fn if act_class is None else act_class()
    except TypeError:  # it takes arguments that are unknown here
        return None
    return _recognise(experts_class, act_fn, has_gate, is_concatenated, limit, alpha)


def _recognise(experts_class, act_fn, has_gate, is_concatenated, limit, alpha):
    """Compares the results of the module's own code for some numbers with each of our activations.
    Neither a name nor a flag reliably tells what a model computes."""
    limit, alpha = (None if c is None else float(c) for c in (limit, alpha))
    scale = 2.0 if limit is None or math.isinf(limit) else 1.5 * limit
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        tails = torch.tensor([-100.0, -30.0, -12.0, 12.0, 30.0, 100.0], dtype=torch.float64)
        numbers = torch.cat((torch.linspace(-scale, scale, 24, dtype=torch.float64), tails))
        gate, up = torch.meshgrid(numbers, numbers.flip(0) + 0.01, indexing="ij")
        gate, up = gate.reshape(-1, 2), up.reshape(-1, 2)
        try:
            theirs = _theirs(experts_class, act_fn, has_gate, is_concatenated, limit, alpha, gate,
                             up)
        except Exception:  # the module needs more than is known here
            return None
        if theirs.shape != up.shape:
            return None
        for activation, constants in _candidates(has_gate, limit, alpha):
            ours = _ours(activation, constants, gate, up)
            if torch.allclose(ours, theirs.to(torch.float64), rtol=1e-5, atol=1e-6):
                return activation, constants
    return None


def _theirs(experts_class, act_fn, has_gate, is_concatenated, limit, alpha, gate, up):
    if not has_gate:
        return act_fn(up)
    module = types.SimpleNamespace(act_fn=act_fn, limit=limit, swiglu_limit=limit, alpha=alpha,
                                   swiglu_alpha=alpha)
    pairs = torch.stack((gate, up), 1 if is_concatenated else 2).flatten(1)
    return experts_class._apply_gate(module, pairs)


def _candidates(has_gate, limit, alpha):
    if not has_gate:
        for activation in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.RELU,
                           Activation.RELU2):
            yield activation, DEFAULT_CONSTANTS
        return
    for activation in (Activation.SWIGLU, Activation.GEGLU, Activation.GEGLU_TANH,
                       Activation.REGLU):
        yield activation, DEFAULT_CONSTANTS
    if limit is None:
        return
    yield Activation.LIMITED_SWIGLU, (limit, 1.0, 0.0)
    for a in (1.0,) if alpha is None else (alpha, 1.0):
        for offset in (1.0, 0.0):
            yield Activation.CLAMPED_SWIGLU, (limit, a, offset)


def _ours(activation, constants, gate, up):
    """Returns the activation's value, as the library defines it."""
    limit, alpha, offset = constants
    functional = torch.nn.functional
    if activation == Activation.CLAMPED_SWIGLU:
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + offset)
    if activation == Activation.LIMITED_SWIGLU:
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    value = {
        Activation.SWIGLU: functional.silu,
        Activation.SILU: functional.silu,
        Activation.GEGLU: functional.gelu,
        Activation.GELU: functional.gelu,
        Activation.GEGLU_TANH: lambda v: functional.gelu(v, approximate="tanh"),
        Activation.GELU_TANH: lambda v: functional.gelu(v, approximate="tanh"),
        Activation.REGLU: functional.relu,
        Activation.RELU: functional.relu,
        Activation.RELU2: lambda v: functional.relu(v).square(),
    }[activation]
    return value(gate) * up if activation.has_gate else value(up)
