# SPDX-License-Identifier: Apache-2.0
"""The MoE block of KempnerForge, with its routed experts divided over ranks.

The block's forward routes, applies the capacity and adds the shared expert. For the routed experts
it calls _local_forward(x [T, H], weights [T, K], ids [T, K]), and only that is replaced here.
"""
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .._activations import Activation
from .._library import InvalidArgument, Unsupported
from ._hugging_face import _compute_dtype, local

_ATTRIBUTES = ("router", "num_experts", "capacity_factor", "gradient_scale", "_local_forward")
_ACTIVATIONS = {F.gelu: Activation.GELU, F.relu: Activation.RELU, F.silu: Activation.SILU}


def matches(module):
    """True if a module is such a block: packed, or with a module for every expert."""
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return False
    return _is_packed(module) or _is_list(module)


def _is_packed(module):
    return all(module._parameters.get(name) is not None and module._parameters[name].dim() == 3
               for name in ("up_w", "down_w"))


def _is_list(module):
    """True if there is a module for every expert. install() turns the list into a dictionary."""
    experts = module._modules.get("experts")
    return isinstance(experts, (nn.ModuleList, nn.ModuleDict)) and all(
        hasattr(expert, "up_proj") and hasattr(expert, "down_proj")
        for expert in _modules_of(experts))


def _modules_of(experts):
    return list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)


def parameter_names(module):
    """Returns the packed parameters, with the experts in dimension 0; none for a list of
    modules."""
    return [name for name in ("gate_w", "up_w", "down_w")
            if module._parameters.get(name) is not None]


def own_parameters(module):
    """Returns the parameters that only this rank has, which are those of a list's experts."""
    return [] if _is_packed(module) else list(module.experts.parameters())


def num_experts(module):
    return module.num_experts


def install(module, experts):
    """Sends a block's picks to the ranks of their experts. Packed parameters already hold only this
    rank's experts. From a list, the experts of other ranks are removed here; names stay."""
    if module.num_experts != experts.num_experts:
        raise InvalidArgument(f"num_experts is {module.num_experts}, but {experts.num_experts} "
                              "experts are divided over ranks")
    if getattr(module, "ep_world_size", 1) != 1:
        raise InvalidArgument(f"ep_world_size is {module.ep_world_size}: KempnerForge has already "
                              "divided the experts of this block")
    if _is_packed(module):
        gated = "gate_w" in parameter_names(module)
        module.switchyard_activation = _activation(gated, module, "_packed_activation")
    else:
        _check_list(module.experts)
        first = module.experts[0]
        module.switchyard_activation = _activation(hasattr(first, "gate_proj"), first,
                                                   "_activation")
        module.switchyard_width = first.up_proj.weight.shape[0]
        own = experts.placement.experts_of(experts.rank)
        module.experts = nn.ModuleDict({str(e): module.experts[e] for e in own})
    module.switchyard_experts = experts
    module._local_forward = types.MethodType(_routed_experts, module)


def _activation(gated, owner, name):
    if gated:
        return Activation.SWIGLU
    function = getattr(owner, name, None)
    if function not in _ACTIVATIONS:
        raise Unsupported(f"{name} is {function}, but must be gelu, relu or silu of "
                          "torch.nn.functional")
    return _ACTIVATIONS[function]


def _check_list(experts):
    """Checks that experts have no other parameters, because their weights are stacked."""
    projections = ["gate_proj", "up_proj", "down_proj"]
    if not hasattr(experts[0], "gate_proj"):
        projections = projections[1:]
    expected = {f"{name}.weight" for name in projections}
    for number, expert in enumerate(experts):
        found = dict(expert.named_parameters())
        if set(found) != expected:
            raise Unsupported(f"experts.{number} has the parameters {sorted(found)}, but must have "
                              f"{sorted(expected)}")
        for name, parameter in found.items():
            if isinstance(parameter, DTensor):
                raise InvalidArgument(f"experts.{number}.{name} is already a DTensor: divide "
                                      "the experts over ranks first")


def _routed_experts(module, x, weights, ids):
    experts = module.switchyard_experts
    if module.gradient_scale and module.training:
        weights = weights.float() * _load_factors(ids, experts)
    gate_up, down = (_packed_weights(module) if _is_packed(module) else
                     _stacked_weights(module, x))
    dtype = _compute_dtype(x.device.type, down.dtype)
    y = experts.moe(experts.plan(ids), x.to(dtype), weights, gate_up.to(dtype), down.to(dtype),
                    activation=module.switchyard_activation)
    return y.to(x.dtype)


def _packed_weights(module):
    """Returns (gate_up, down) from weights that are stored (in, out)."""
    *ups, down = (local(getattr(module, name)).transpose(1, 2) for name in parameter_names(module))
    return torch.cat(ups, 1), down


def _stacked_weights(module, x):
    experts = _modules_of(module.experts)
    gated = module.switchyard_activation.has_gate
    if not experts:
        width = module.switchyard_width
        return (x.new_empty(0, 2 * width if gated else width, x.shape[1]),
                x.new_empty(0, x.shape[1], width))
    ups = [projection.weight for expert in experts
           for projection in ((expert.gate_proj, expert.up_proj) if gated else (expert.up_proj,))]
    return (torch.cat(ups).unflatten(0, (len(experts), -1)),
            torch.stack([expert.down_proj.weight for expert in experts]))


@torch.no_grad()
def _load_factors(ids, experts):
    """Returns [T, K]: the factors by which gradient_scale multiplies the experts' outputs. A factor
    is the mean number of picks of the owner's experts divided by the expert's own, over all
    ranks."""
    picks = ids.flatten().long()
    counts = picks.new_zeros(experts.num_experts).index_add_(0, picks, torch.ones_like(picks))
    if experts.size > 1:
        dist.all_reduce(counts, group=experts.group)
    owners = torch.tensor(experts.placement.owners, device=ids.device)
    totals = counts.new_zeros(2, experts.size).index_add_(
        1, owners, torch.stack((counts, torch.ones_like(counts))))
    mean = totals[0].double() / totals[1].clamp(min=1)
    return (mean[owners] / counts.clamp(min=1)).float()[ids]
