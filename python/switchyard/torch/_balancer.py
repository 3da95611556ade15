# SPDX-License-Identifier: Apache-2.0
"""Balances experts without a loss, by adjusting the bias of their scores after every step."""
import inspect
import math
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from .._library import InvalidArgument, Unsupported
from ._process_group import group_of

_NAMES = ("e_score_correction_bias", "expert_bias")  # in DeepSeek-V3 and later; in TorchTitan
_RULES = ("sign", "moving_average")
_balancers = weakref.WeakSet()


class LoadBalancer:
    """Moves the biases that routers add to the scores of experts, for the choice alone, towards
    even loads:

        balancer = LoadBalancer(model)
        …
        optimizer.step()
        balancer.step()

    `biases` is a model, whose routers are found by their e_score_correction_bias or expert_bias, or
    a mapping to biases, f32 of E elements. Its keys are modules that are called with picks [T, K],
    or return them, as integers; or any other objects, whose picks are passed to count().

    A forward's picks are counted once, when a backward first reaches the module's output. So
    evaluation, forwards without gradients and recomputation by activation checkpointing count
    nothing, and neither does a step that run_step() runs again. Counting never waits for a GPU. −1,
    and any id of E or above, is no pick.

    step() sums the counts of all ranks of `group`, which are those that have the same layers
    (default: all ranks), to n [E] for each layer. Then it moves the biases, equally on every rank,
    by `rule`:
      "sign" (DeepSeek-V3, TorchTitan): d = rate · sign(mean(n) − n); bias += d − mean(d)
      "moving_average" (KempnerForge): average = decay · average + (1 − decay) · n/Σn, initially
          1/E; bias += rate · (1/E − average)
    `rate` may be set at any time.
    """

    def __init__(self, biases, *, rate=1e-3, rule="sign", decay=0.99, group=None):
        if not (math.isfinite(rate) and rate >= 0):
            raise InvalidArgument(f"rate ({rate}) must be finite and not negative")
        if rule not in _RULES:
            raise InvalidArgument(f"rule is {rule!r}, but must be one of {', '.join(_RULES)}")
        if not 0 <= decay < 1:
            raise InvalidArgument(f"decay ({decay}) must be at least 0 and less than 1")
        self.rate, self.rule, self.decay = rate, rule, decay
        self._group = group
        if isinstance(biases, torch.nn.Module):
            self._biases = _find(biases)
        else:
            self._biases = {key: (str(i), lambda bias=bias: bias)
                            for i, (key, bias) in enumerate(biases.items())}
        if not self._biases:
            raise InvalidArgument("the model has no biases called " + " or ".join(_NAMES) +
                                  ": map modules to their biases with `biases`")
        self._sizes = {key: self._bias(key).numel() for key in self._biases}
        # Layers with equal numbers of experts are moved together.
        self._keys = {size: [key for key, own in self._sizes.items() if own == size]
                      for size in self._sizes.values()}
        self._counts = {}  # by key: [E] i64, since the last step
        self._averages = {}  # by E: [layers of this size, E] f32
        balancer = weakref.ref(self)
        self._hooks = [key.register_forward_hook(_hook(balancer), with_kwargs=True)
                       for key in self._biases if isinstance(key, torch.nn.Module)]
        _balancers.add(self)

    def count(self, key, picks, y):
        """Counts picks [T, K] of the layer `key` once a backward reaches y; returns y. Modules that
        are keys do this automatically."""
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y
        counted, total = self._count(picks, self._sizes[key]), self._total(key, picks.device)

        def reached(_gradient):
            total.add_(counted)
            counted.zero_()  # a second backward over the same graph adds nothing

        y.register_hook(reached)
        return y

    @torch.no_grad()
    def step(self):
        """Moves the biases by the counts since the last step, over all ranks. Collective. Layers
        without any picks stay unchanged."""
        sums = self._sums().split([size * len(keys) for size, keys in self._keys.items()])
        for (size, keys), counts in zip(self._keys.items(), sums):
            for key, move in zip(keys, self._moves(size, counts.view(-1, size))):
                bias = self._bias(key)
                move = move.to(bias.device).view(bias.shape)
                if isinstance(bias, DTensor):
                    move = distribute_tensor(move, bias.device_mesh, bias.placements,
                                             src_data_rank=None)
                bias.add_(move)
        for total in self._counts.values():
            total.zero_()

    def pick_counts(self):
        """Returns this rank's counts since the last step, by layer name: [E] i64."""
        return {name: self._total(key, self._bias(key).device).clone()
                for key, (name, _) in self._biases.items()}

    def state_dict(self):
        """Returns the moving averages by layer name, [E] f32. Empty if the rule has none."""
        if self.rule != "moving_average":
            return {}
        return {self._biases[key][0]: average.clone() for size, keys in self._keys.items()
                for key, average in zip(keys, self._average(size))}

    def load_state_dict(self, averages):
        """Restores the result of state_dict(), for the same layers."""
        own = self.state_dict()
        if {name: a.shape for name, a in own.items()} != {n: a.shape for n, a in averages.items()}:
            raise InvalidArgument(f"the averages are of layers {sorted(averages)}, but the layers "
                                  f"here are {sorted(own)}, or have other numbers of experts")
        for size, keys in self._keys.items() if own else ():
            for key, average in zip(keys, self._average(size)):
                average.copy_(averages[self._biases[key][0]])

    def close(self):
        """Stops counting."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module, args, kwargs, output):
        """Finds the picks in a module's call and counts them. Called by the module's hook."""
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        reached = next((y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad),
                       None)
        if reached is None:
            return
        picks = next((p for p in (kwargs.get("top_k_index"), *args, *kwargs.values(), *outputs)
                      if isinstance(p, torch.Tensor) and p.dim() == 2 and
                      p.dtype in (torch.int32, torch.int64)), None)
        if picks is None:
            raise InvalidArgument(f"{type(module).__name__} neither takes nor returns picks, which "
                                  "must be int32 or int64 [T,K]")
        self.count(module, picks, reached)

    @staticmethod
    def _count(picks, num_experts):
        """Returns counts [E] i64. Avoids bincount, which waits for a GPU."""
        ids = _local(picks).detach().flatten().long()
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
        counts = ids.new_zeros(num_experts + 1)
        return counts.scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]

    def _total(self, key, device):
        total = self._counts.get(key)
        if total is None:
            total = torch.zeros(self._sizes[key], dtype=torch.int64, device=device)
        elif total.device != device:
            total = total.to(device)  # the model has moved
        self._counts[key] = total
        return total

    def _sums(self):
        """Returns the counts of all ranks, ordered by number of experts and then by layer."""
        device = self._device
        sums = torch.cat([self._total(key, self._bias(key).device).to(device)
                          for keys in self._keys.values() for key in keys])
        group = group_or_world(self._group)
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums

    def _moves(self, size, counts):
        """Returns the moves [L, E] f32 for counts [L, E], bitwise as in
        src/moe/layer/load_balancer.cpp."""
        total = counts.sum(1, keepdim=True)
        if self.rule == "sign":
            signs = torch.sign(total - counts * size)  # exactly that of mean(n) − n
            # Divides by a tensor, because GPUs would multiply by the reciprocal of a scalar.
            mean = signs.sum(1, keepdim=True).float() / torch.full_like(total, size).float()
            return self.rate * (signs.float() - mean)
        average = self._average(size)
        has_picks = (total > 0).float()  # testing it on the host would wait for a GPU
        share = counts.float() / total.clamp(min=1).float()
        fresh = (1 - torch.tensor(self.decay, dtype=torch.float32)).item()
        average += has_picks * (fresh * (share - average))
        return has_picks * (self.rate * (1 / size - average))

    def _average(self, size):
        average = self._averages.get(size)
        if average is None:
            average = torch.full((len(self._keys[size]), size), 1 / size, device=self._device)
        self._averages[size] = average.to(self._device)
        return self._averages[size]

    @property
    def _device(self):
        return self._bias(next(iter(self._biases))).device

    def _bias(self, key):
        name, bias = self._biases[key]
        if bias().dtype != torch.float32:
            raise InvalidArgument(f"the bias of {name} is {bias().dtype}, but must be float32: "
                                  f"steps of {self.rate} would be lost in it")
        return bias()


class SavedCounts:
    """The counts of all balancers, to be restored if a step is run again."""

    def __init__(self):
        self._saved = [(balancer, {key: total.clone() for key, total in balancer._counts.items()})
                       for balancer in _balancers]

    def restore(self):
        for balancer, saved in self._saved:
            for key, total in balancer._counts.items():
                total.copy_(saved.get(key, 0 * total))


def group_or_world(group):
    if group is not None:
        return group_of(group)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hook(balancer):
    """Returns a function, which copies of the module share. An object would be copied, along with
    everything that it refers to."""

    def hook(module, args, kwargs, output):
        alive = balancer()
        if alive is not None and module in alive._biases:
            alive._watch(module, args, kwargs, output)

    return hook


def _find(model):
    """Returns {the module that sees a router's picks: (its name, a function that returns the
    bias)}. Buffers are looked up each time, because model.to() replaces them."""
    modules = dict(model.named_modules())
    is_masked = any("ep_router" in (getattr(module, "ep_plan", None) or {}).values()
                    for module in modules.values())
    found = {}
    for name, owner in modules.items():
        for attribute in _NAMES:
            if owner._buffers.get(attribute) is None and owner._parameters.get(attribute) is None:
                continue
            key, key_name = _called_with_picks(name, modules)
            if is_masked and getattr(key, "_is_expert_parallel", False):
                raise Unsupported(f"transformers masks the picks of {key_name} and gives it local "
                                  "expert ids: call count() with the global ids")
            found[key] = (key_name, lambda owner=owner, attribute=attribute:
                          getattr(owner, attribute))
    return found


def _called_with_picks(name, modules):
    """Returns the experts of the nearest module above a router that has some, and their name. If
    they are not called with picks, as in TorchTitan, returns the router, which returns the
    picks."""
    block = name
    while True:
        experts = getattr(modules[block], "experts", None)
        if isinstance(experts, torch.nn.Module):
            break
        if not block:
            raise InvalidArgument(f"no module above {name!r} has `experts`: give `biases`, a map "
                                  "from the modules that are called with picks to their biases")
        block = block.rpartition(".")[0]
    prefix = block + "." if block else ""
    if "top_k_index" in inspect.signature(experts.forward).parameters:
        return experts, prefix + "experts"
    for child in ("router", "gate"):
        if isinstance(getattr(modules[block], child, None), torch.nn.Module):
            return getattr(modules[block], child), prefix + child
    raise InvalidArgument(f"the experts of {block!r} take no top_k_index, and it has no router: "
                          "give `biases`, a map from the modules that are called with picks to "
                          "their biases")
