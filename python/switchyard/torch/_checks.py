# SPDX-License-Identifier: Apache-2.0
"""Checks of tensors. The library sees only pointers, so every mistake must be found here."""
import torch

from .._activations import Activation
from .._library import InvalidArgument, Unsupported


def _padded(words):
    return (words + 3) // 4 * 4


def most_rows(num_tokens, top_k, num_experts, alignment):
    """Returns the number of rows that is enough for any routing."""
    if alignment < 1 or top_k < 1 or num_experts < 1:
        raise InvalidArgument(f"alignment ({alignment}), top_k ({top_k}) and num_experts "
                              f"({num_experts}) must be positive")
    rows = num_tokens * top_k
    if alignment == 1:
        return rows
    groups = torch.sym_min(num_experts, rows)
    return (rows + groups * (alignment - 1)) // alignment * alignment


def plan_words(num_tokens, top_k, num_experts, alignment):
    """Returns the length of a plan."""
    picks = num_tokens * top_k
    return (_padded(10) + _padded(10) + 5 * _padded(num_experts) + _padded(1) +
            2 * _padded(num_experts + 1) + 3 * _padded(picks) +
            _padded(most_rows(num_tokens, top_k, num_experts, alignment)))


def require_real(tensor, name):
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"{name} is {tensor.dtype}, but must be float32 or bfloat16")


def require(tensor, name, shape, like, dtype=None):
    """Raises unless a tensor has this shape, and the device and dtype of another one."""
    dtype = like.dtype if dtype is None else dtype
    if len(tensor.shape) != len(shape) or tuple(tensor.shape) != tuple(shape):
        raise InvalidArgument(f"{name} is {list(tensor.shape)}, but must be {list(shape)}")
    if tensor.dtype != dtype:
        raise InvalidArgument(f"{name} is {tensor.dtype}, but must be {dtype}")
    if tensor.device != like.device:
        raise InvalidArgument(f"{name} is on {tensor.device}, but other tensors are on "
                              f"{like.device}")


def require_tokens(tensor, name):
    require_real(tensor, name)
    if tensor.dim() != 2:
        raise InvalidArgument(f"{name} is {list(tensor.shape)}, but must have two dimensions")


def require_ids(expert_ids):
    if expert_ids.dim() != 2 or expert_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"expert_ids is {expert_ids.dtype} {list(expert_ids.shape)}, but "
                              "must be int32 or int64 [T,K]")


def require_plan(plan, like, num_tokens, top_k, num_experts, alignment):
    words = plan_words(num_tokens, top_k, num_experts, alignment)
    if tuple(plan.shape) != (words,):
        raise InvalidArgument(
            f"the plan's tensor is {list(plan.shape)}, but must be [{words}] for {num_tokens} "
            f"tokens with {top_k} of {num_experts} experts, aligned to {alignment}")
    require(plan, "the plan's tensor", plan.shape, like, torch.int32)
    if not plan.is_contiguous():
        raise InvalidArgument("the plan's tensor must be contiguous")


def inner_width(activation, intermediate):
    return 2 * intermediate if Activation(activation).has_gate else intermediate


def check_experts(tokens, name, gate_up, down, gate_up_bias, down_bias, activation, constants):
    """Raises if weights do not fit the tokens or each other."""
    require_tokens(tokens, name)
    hidden = tokens.shape[1]
    if (gate_up.dim() != 3 or down.dim() != 3 or down.shape[0] != gate_up.shape[0] or
            gate_up.shape[2] != hidden or down.shape[1] != hidden or
            gate_up.shape[1] != inner_width(activation, down.shape[2])):
        inner = "2I" if Activation(activation).has_gate else "I"
        raise InvalidArgument(
            f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit tokens of "
            f"{hidden} values: they must be [E,{inner},{hidden}] and [E,{hidden},I]")
    require(gate_up, "gate_up", gate_up.shape, tokens)
    require(down, "down", down.shape, tokens)
    for bias, size, bias_name in ((gate_up_bias, gate_up.shape[1], "gate_up_bias"),
                                  (down_bias, hidden, "down_bias")):
        if bias is not None:
            require(bias, bias_name, (gate_up.shape[0], size), tokens)
    if len(constants) != 3:
        raise InvalidArgument(f"constants are {list(constants)}, but must be limit, alpha and "
                              "offset")


def check_moe(x, pick_weights, plan, alignment, weights, activation, constants):
    check_experts(x, "x", *weights, activation, constants)
    if pick_weights.dim() != 2:
        raise InvalidArgument(f"pick_weights is {list(pick_weights.shape)}, but must be [T,K]")
    require(pick_weights, "pick_weights", (x.shape[0], pick_weights.shape[1]), x, torch.float32)
    require_plan(plan, x, *pick_weights.shape, weights[0].shape[0], alignment)


def check_router(x, gate, gate_bias, score_bias):
    require_tokens(x, "x")
    require_tokens(gate, "gate")
    if gate.shape[1] != x.shape[1]:
        raise InvalidArgument(f"gate is {list(gate.shape)}, but must be [E,{x.shape[1]}] for x "
                              f"{list(x.shape)}")
    require(gate, "gate", gate.shape, x, gate.dtype)
    if gate_bias is not None:
        require(gate_bias, "gate_bias", (gate.shape[0],), gate)
    if score_bias is not None:
        require(score_bias, "score_bias", (gate.shape[0],), gate, torch.float32)
