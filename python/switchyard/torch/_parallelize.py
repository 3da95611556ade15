# SPDX-License-Identifier: Apache-2.0
"""Divides the experts of a model over ranks, and reduces gradients over them."""
import functools
import types
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .._library import InvalidArgument
from . import _hugging_face, _kempner_forge
from ._expert_parallel import DEFAULT_TIMEOUT, ExpertParallel
from ._hugging_face import local
from ._process_group import group_of

_BUCKET_BYTES = 32 << 20


class _HuggingFaceExperts:
    """Modules decorated with transformers' use_experts_implementation."""

    @staticmethod
    def matches(module):
        down = module._parameters.get("down_proj")
        return down is not None and down.dim() == 3 and hasattr(module, "has_gate")

    @staticmethod
    def parameter_names(module):
        names = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias",
                 "down_proj_bias")
        return [name for name in names if module._parameters.get(name) is not None]

    @staticmethod
    def own_parameters(_module):
        return []

    @staticmethod
    def num_experts(module):
        return module.down_proj.shape[0]

    @staticmethod
    def install(module, _experts):
        module.forward = types.MethodType(_forward, module)


def _forward(module, hidden_states, top_k_index, top_k_weights):
    return _hugging_face.parallel_experts_forward(module.switchyard_experts, module, hidden_states,
                                                  top_k_index, top_k_weights)


_KINDS = (_HuggingFaceExperts, _kempner_forge)


def _kind_of(module):
    return next((kind for kind in _KINDS if kind.matches(module)), None)


def apply_expert_parallel(model, ep_mesh, *, row_capacity=0, token_capacity=0,
                          timeout=DEFAULT_TIMEOUT):
    """Divides the experts of every MoE block of a model over the ranks of `ep_mesh`, a
    one-dimensional DeviceMesh. Collective; returns the model.

    Expert parameters become DTensors, Shard(0) on that mesh: their names and global shapes stay,
    this rank keeps its experts, and the memory of the others is freed. Every rank must start with
    the same parameters, on a device or on "meta". Call it before fully_shard, which gets the other
    dimensions of the mesh. The ranks of the model see different tokens. Call reduce_gradients()
    between backward() and the optimizer's step.

    Capacities and timeout are those of ExpertParallel. It recognises blocks of transformers and of
    KempnerForge; for TorchTitan, switchyard.torchtitan replaces the dispatcher.
    """
    group = group_of(ep_mesh)
    found = [(name, module, _kind_of(module)) for name, module in model.named_modules()
             if _kind_of(module) is not None]
    if not found:
        raise InvalidArgument(f"{type(model).__name__} has no experts that are known here: it "
                              "needs blocks of transformers or KempnerForge")
    for name, module, kind in found:
        for parameter in kind.parameter_names(module):
            if isinstance(getattr(module, parameter), DTensor):
                raise InvalidArgument(f"{name}.{parameter} is already a DTensor: divide the "
                                      "experts once, and before fully_shard")
    for _, module, kind in found:
        experts = ExpertParallel(group, kind.num_experts(module), row_capacity=row_capacity,
                                 token_capacity=token_capacity, timeout=timeout)
        module.switchyard_experts = experts
        if experts.size > 1:
            for parameter in kind.parameter_names(module):
                _shard(module, parameter, ep_mesh, experts)
        kind.install(module, experts)
    if group.size() > 1:
        _watch_optimizers(model)
    return model


def _shard(module, name, mesh, experts):
    """Turns a parameter [E, …] into a DTensor with this rank's experts."""
    whole = module._parameters[name]
    own = experts.placement.experts_of(experts.rank)
    first = own[0] if own else whole.shape[0]
    part = whole.detach()[first:first + len(own)].clone()
    sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole.shape,
                                 stride=torch.empty_like(whole, device="meta").stride())
    module._parameters[name] = torch.nn.Parameter(sharded, requires_grad=whole.requires_grad)


def _blocks(model):
    """Returns the modules of a model whose experts were divided, each with its ExpertParallel."""
    return [(module, module.switchyard_experts) for module in model.modules()
            if isinstance(getattr(module, "switchyard_experts", None), ExpertParallel)]


def expert_parameters(model):
    """Returns the parameters of a model that apply_expert_parallel has divided over ranks."""
    found = []
    for module, _ in _blocks(model):
        kind = _kind_of(module)
        found += [getattr(module, name) for name in kind.parameter_names(module)]
        found += kind.own_parameters(module)
    return found


def parameter_groups(model):
    """Returns the model's parameters as two groups for an optimizer: experts, and everything else.

    Optimizers that update many tensors at once need a group's tensors to be alike, and parameters
    that are divided over ranks differ from those that are not."""
    experts = expert_parameters(model)
    known = set(map(id, experts))
    return [{"params": [p for p in model.parameters() if id(p) not in known]},
            {"params": experts}]


@torch.no_grad()
def reduce_gradients(model):
    """Turns the gradients of a model into those of the mean of all ranks' losses, over the ranks
    that experts are divided over. Collective; call it once, after the last backward of a step.

    Backward has summed an expert's gradient over the tokens of all ranks, so it is divided by the
    number of ranks. Every other gradient is this rank's own, and becomes the mean over these ranks;
    those that fully_shard has already reduced over them stay unchanged. Averages over other ranks
    are left to fully_shard.

    Ranks may lack the gradients of parameters that they did not use; these count as 0. It is an
    error to call this twice for the same gradients, or after more gradients were added to reduced
    ones.
    """
    blocks = _blocks(model)
    if not blocks:
        raise InvalidArgument(f"{type(model).__name__} has no experts that were divided over ranks: "
                              "call apply_expert_parallel first")
    group = blocks[0][1].group
    experts = expert_parameters(model)
    known = set(map(id, experts))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    _require_new(blocks, [p.grad for p in (*experts, *others) if p.grad is not None])
    _fill_in(others, group)
    own = [p.grad for p in others if p.grad is not None and not _is_reduced(p.grad, group)]
    for bucket in _buckets(list(map(local, own))):
        flat = torch._utils._flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())
        for gradient, reduced in zip(bucket,
                                     torch._utils._unflatten_dense_tensors(flat, bucket)):
            gradient.copy_(reduced)
    for parameter in experts:
        if parameter.grad is not None:
            local(parameter.grad).div_(group.size())
    for parameter in (*experts, *others):
        if parameter.grad is not None:
            parameter.grad._switchyard_reduced = True
    for _, block in blocks:
        block.is_reduced = True
        block.has_stepped = False


def _require_new(blocks, gradients):
    """Raises if one of them was reduced before, or holds a gradient that was."""
    if _is_alone(blocks):
        return
    if any(not block.has_stepped for _, block in blocks) and any(
            getattr(gradient, "_switchyard_reduced", False) for gradient in gradients):
        raise InvalidArgument(
            "reduce_gradients was already called for these gradients: call it once per step, after "
            "the last backward; to skip a step, call zero_grad(set_to_none=True)")


def _is_alone(blocks):
    return blocks[0][1].size == 1


def _fill_in(parameters, group):
    """Adds a gradient of 0 for each parameter that only other ranks have one for, because the ranks
    sum lists that must match."""
    if not parameters:
        return
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32,
                       device=_device_of(group))
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    for parameter, needed in zip(parameters, has.tolist()):
        if needed and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _device_of(group):
    """Returns the device of small tensors for a group's collectives."""
    backends = dist.get_backend_config(group)
    return "cpu" if "cpu" in str(backends) else torch.device("cuda", torch.cuda.current_device())


def _is_reduced(gradient, group):
    """True if a gradient is sharded over ranks that include the whole group."""
    return (isinstance(gradient, DTensor) and
            set(dist.get_process_group_ranks(group)) <=
            set(gradient.device_mesh.mesh.flatten().tolist()))


def _buckets(gradients):
    """Yields lists of gradients of one dtype and device, about 32 MiB each, in the same order on
    all ranks."""
    buckets, sizes = {}, {}
    for gradient in gradients:
        key = gradient.dtype, gradient.device
        size = gradient.numel() * gradient.element_size()
        if key in buckets and sizes[key] + size > _BUCKET_BYTES:
            yield buckets.pop(key)
        if key not in buckets:
            buckets[key], sizes[key] = [], 0
        buckets[key].append(gradient)
        sizes[key] += size
    yield from buckets.values()


@torch.no_grad()
def clip_grad_norm_(model, max_norm, *, error_if_nonfinite=False):
    """Scales all gradients of a model so that their norm over all ranks is at most max_norm.
    Returns the norm before scaling, the same on every rank. Collective, after reduce_gradients().

    Each gradient counts once: a part of one is counted by the rank that has it.
    """
    divided = {id(p): (experts.group,) for module, experts in _blocks(model)
               for p in _kind_of(module).own_parameters(module)}
    # Every rank takes part in every sum, even if it has no part of it.
    squares = {(experts.group,): torch.zeros((), device=next(model.parameters()).device)
               for module, experts in _blocks(model) if not _kind_of(module).parameter_names(module)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups = divided.get(id(parameter)) or _groups_of(parameter)
            squares[groups] = squares.get(groups, 0.0) + _square(parameter.grad, parameter)
    total = 0.0
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    norm = torch.as_tensor(total).sqrt()
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is not finite: {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
    return norm


def _groups_of(parameter):
    """Returns the groups of ranks with the other parts of a parameter, by mesh dimension."""
    if not isinstance(parameter, DTensor):
        return ()
    if any(placement.is_replicate() or placement.is_partial()
           for placement in parameter.placements):
        raise InvalidArgument(f"a parameter is placed {parameter.placements}, but must be sharded "
                              "over every dimension of its mesh")
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))


def _square(gradient, parameter):
    if gradient is None:
        return torch.zeros((), device=parameter.device)
    return torch.linalg.vector_norm(local(gradient), dtype=torch.float32).square()


# A step on gradients that were not reduced would be silently wrong, so optimizers raise an error.

_models = weakref.WeakSet()


def _watch_optimizers(model):
    _register_hook()
    _models.add(model)


@functools.lru_cache(maxsize=None)
def _register_hook():
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(_require_reduced)


def _require_reduced(optimizer, _args, _kwargs):
    for model in list(_models):
        if all(experts.is_reduced for _, experts in _blocks(model)):
            for _, experts in _blocks(model):
                experts.has_stepped = True
            continue
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in own for p in model.parameters()):
            raise InvalidArgument(
                "the gradients were not reduced over the ranks that experts are divided over: call "
                "switchyard.torch.reduce_gradients(model) between backward() and the step of the "
                "optimizer")
