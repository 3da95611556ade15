# SPDX-License-Identifier: Apache-2.0
"""Switchyard as the token dispatcher of TorchTitan, 0.3.0 or later:

    --override.imports switchyard.torchtitan.token_dispatcher --training.disable_cuda_graphs

Importing this module registers the override. Without TorchTitan, only the class is available. Names
end in shapes, as in TorchTitan: T tokens of this rank with K picks, D wide; E experts, e of them on
this rank, with R rows.
"""
import dataclasses
import importlib.metadata
import warnings

import torch

from ._library import Unsupported
from .torch import _functions, _ops
from .torch._expert_parallel import DEFAULT_TIMEOUT, ExpertParallel

try:
    from torchtitan.config import override
    from torchtitan.models.common.token_dispatcher import (AllToAllTokenDispatcher,
                                                           BaseEPTokenDispatcher)
except ImportError as error:
    override = None
    if error.name != "torchtitan":
        try:
            _version = importlib.metadata.version("torchtitan")
        except importlib.metadata.PackageNotFoundError:
            _version = "(not a release)"
        warnings.warn(f"switchyard.torchtitan is not registered with torchtitan {_version}, since "
                      "it needs the overrides and token dispatchers that 0.3.0 and later have: "
                      f"{error}", RuntimeWarning, stacklevel=2)

    class BaseEPTokenDispatcher:
        """A stand-in for TorchTitan's class of this name."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            num_experts: int
            top_k: int

        def __init__(self, config):
            self.num_experts = config.num_experts
            self.top_k = config.top_k
            self.ep_mesh = None

        def wire_meshes(self, *, ep_mesh):
            self.ep_mesh = ep_mesh
            self.init_buffer()


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The values of dispatch() that combine() needs."""
    plan: object
    topk_scores_TK: torch.Tensor


class _OneRank:
    """Replaces ExpertParallel if there is no mesh to divide experts over."""

    def __init__(self, num_experts, alignment):
        self.size = 1
        self.num_experts = self.num_local_experts = num_experts
        self.alignment = alignment

    def plan(self, expert_ids):
        return _functions.plan(expert_ids, self.num_experts, alignment=self.alignment)

    def dispatch(self, plan, x):
        return _functions.dispatch(plan, x, exact=True)

    def combine(self, plan, rows, pick_weights):
        return _functions.combine(plan, rows, pick_weights)


class TokenDispatcher(BaseEPTokenDispatcher):
    """Moves tokens to the ranks of their experts and back, over Switchyard.

    Ranks may have any number of tokens, or none, and experts need not divide evenly: they are
    placed as Shard(0) places their weights. Every rank of the mesh makes the same calls.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Each expert's rows begin at a multiple of `pad_multiple`. With `score_before_experts`,
        scores multiply the experts' inputs, and otherwise their outputs. `timeout` is the number of
        seconds that a rank waits for another."""
        pad_multiple: int = 1
        score_before_experts: bool = False
        timeout: float = DEFAULT_TIMEOUT

    def __init__(self, config):
        super().__init__(config)
        self.pad_multiple = config.pad_multiple
        self.score_before_experts = config.score_before_experts
        self.timeout = config.timeout
        self.init_buffer()

    def init_buffer(self):
        """Creates the dispatcher's state. Collective if there is a mesh."""
        if self.ep_mesh is None:
            self._experts = _OneRank(self.num_experts, self.pad_multiple)
        else:
            self._experts = ExpertParallel(self.ep_mesh, self.num_experts,
                                           alignment=self.pad_multiple, timeout=self.timeout)
        self._first_offset = self._find_row_offsets()

    def _find_row_offsets(self):
        """Returns where row_offsets begin in a plan. The tables of picks come after them, so the
        position is the same for any number of tokens, and torch.compile sees a constant."""
        if self._experts.size > 1:
            return self._experts._dispatchers.tables["row_offsets"]
        return _ops.plan_tables(0, self.top_k, self.num_experts, self.pad_multiple)[1]

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        """Returns (routed_input_RD, num_tokens_per_local_expert_e, metadata). The rows of each
        expert are those of rank 0's tokens, then rank 1's, and so on. Counts include padding, which
        is 0."""
        del num_local_tokens_per_expert_E  # the plan does its own counting
        if self.score_before_experts:
            # The rows of one token now differ, so each pick becomes a token of its own.
            x_TD = (x_TD.float().unsqueeze(1) * topk_scores_TK.unsqueeze(2)).to(x_TD.dtype)
            x_TD = x_TD.flatten(0, 1)
            topk_expert_ids_TK = topk_expert_ids_TK.reshape(-1, 1)
            topk_scores_TK = x_TD.new_ones(x_TD.shape[0], 1, dtype=torch.float32)
        plan = self._experts.plan(topk_expert_ids_TK)
        routed_input_RD = self._experts.dispatch(plan, x_TD)
        first, num_experts = self._first_offset, self._experts.num_local_experts
        row_offsets = plan.tensor[first:first + num_experts + 1]
        return routed_input_RD, row_offsets.diff().long(), Metadata(plan, topk_scores_TK)

    def combine(self, routed_output_RD, metadata, x_TD):
        """Returns out_TD: the sum, in f32, of the rows of each token's picks."""
        out = self._experts.combine(metadata.plan, routed_output_RD, metadata.topk_scores_TK)
        if not self.score_before_experts:
            return out
        return out.unflatten(0, (x_TD.shape[0], self.top_k)).float().sum(1).to(out.dtype)


def token_dispatcher(config, *, timeout=DEFAULT_TIMEOUT):
    """The override: makes a TokenDispatcher.Config from a config of TorchTitan's
    AllToAllTokenDispatcher, or of its TorchAOTokenDispatcher, which pads."""
    known = {field.name for field in dataclasses.fields(TokenDispatcher.Config)} - {"timeout"}
    options = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in known:
            options[field.name] = value
        elif value != field.default:
            raise Unsupported(f"{type(config).__qualname__} has {field.name}={value!r}, which "
                              "Switchyard's dispatcher does not support")
    return TokenDispatcher.Config(**options, timeout=timeout)


if override is not None:
    override(target=AllToAllTokenDispatcher.Config,
             description="Switchyard's expert parallelism.")(token_dispatcher)
