# SPDX-License-Identifier: Apache-2.0
"""The expert parallelism of Hugging Face transformers, DistributedConfig(ep_size=…), on top of
ExpertParallel."""
import functools
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .._library import InvalidArgument, Unsupported
from ._expert_parallel import DEFAULT_TIMEOUT, ExpertParallel, chunked
from ._hugging_face import parallel_experts_forward

_installed = []  # the InstalledEp in force, if any


def install_ep(*, row_capacity=0, token_capacity=0, timeout=DEFAULT_TIMEOUT):
    """Makes ExpertParallel move the tokens of all models that transformers divides over ranks from
    now on, whatever their experts_implementation. Call it on every rank, before a model is loaded.
    Returns an InstalledEp, whose remove() undoes it.

        switchyard.torch.install_ep()
        model = AutoModelForCausalLM.from_pretrained(
            name, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8))

    Meshes, FSDP2, loading and saving remain those of transformers. The number of experts need not
    be a multiple of ep_size: they are divided as by torch's Shard(0), for example 20 over 8 ranks
    as 3, 3, 3, 3, 3, 3, 2 and 0. Gradients are those of the mean of all batches' losses.

    save_pretrained() writes files for any number of ranks. Training resumes, on the same or another
    number of ranks, from what torch.distributed.checkpoint saves of get_state_dict(model,
    optimizer).

    Capacities and timeout are those of ExpertParallel. With capacities nothing waits for a GPU, and
    InstalledEp.check() reports whether they were enough.

    This needs transformers 5.19 or later. Older versions do not dispatch tokens: every rank has all
    of them and masks the picks of other ranks' experts. There is nothing to replace, so this raises
    Unsupported; experts_implementation="switchyard" runs their masked experts without it.
    """
    for name, value in (("row_capacity", row_capacity), ("token_capacity", token_capacity)):
        if value < 0:
            raise InvalidArgument(f"{name} ({value}) must not be negative")
    styles = _parallel_styles()
    while _installed:
        _installed[-1].remove()
    return InstalledEp(styles, dict(row_capacity=row_capacity, token_capacity=token_capacity,
                                    timeout=timeout))


def _parallel_styles():
    try:
        import transformers.modeling_utils  # registers the styles
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError as error:
        raise Unsupported(f"install_ep needs transformers 5.19 or later: {error}") from error
    if "ep_dispatch_experts" not in ALL_PARALLEL_STYLES:
        raise Unsupported(
            f"transformers {transformers.__version__} does not dispatch tokens: it masks the picks "
            'of other ranks\' experts, and experts_implementation="switchyard" supports that. '
            "install_ep needs transformers 5.19 or later")
    return ALL_PARALLEL_STYLES


class InstalledEp:
    """The replacements that install_ep() made in transformers, and the models loaded since."""

    def __init__(self, styles, options):
        self._experts = weakref.WeakKeyDictionary()  # by module
        self._styles = styles
        self._theirs = {name: styles[name] for name in ("ep_dispatch_experts", "grouped_gemm")}
        dispatch, shard = (type(style) for style in self._theirs.values())
        styles.register("ep_dispatch_experts", _dispatch_style(dispatch, self._experts, options))
        styles.register("grouped_gemm", _shard_style(shard))
        self._convert = _let_ranks_load_nothing()
        _installed.append(self)

    @property
    def experts(self):
        """The ExpertParallel of each MoE block."""
        return list(self._experts.values())

    def check(self):
        """Raises the same InvalidArgument on every rank if a rank has had more rows or tokens since
        the last check than there is room for; those were left out. Collective; waits for a GPU."""
        needed = [experts.take_needed() for experts in self.experts if experts.needed is not None]
        if not needed:
            return
        most = torch.stack(needed).amax(0)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        overflow, rows, tokens = most.tolist()
        if overflow:
            first = self.experts[0]
            raise InvalidArgument(
                f"a rank needs room for {rows} rows and {tokens} tokens, but "
                f"row_capacity is {first.row_capacity} and token_capacity "
                f"{first.token_capacity or first.row_capacity}")

    def remove(self):
        """Restores the styles of transformers. Models that were loaded stay unchanged."""
        if self not in _installed:
            return
        _installed.remove(self)
        for name, style in self._theirs.items():
            self._styles.register(name, style)
        _weight_converter().convert = self._convert


class _Experts(ExpertParallel):
    """Remembers the needs of its plans, which no other code sees."""

    needed = None  # the maximum since the last check, as in SharedPlan.needed

    def plan(self, expert_ids):
        plan = super().plan(expert_ids)
        if self.row_capacity > 0:
            if self.needed is None:
                self.needed = torch.zeros_like(plan.needed)
            torch.maximum(self.needed, plan.needed, out=self.needed)
        return plan

    def take_needed(self):
        """Returns [3] i64: whether some rank had no room, and the most rows and tokens of any
        rank."""
        overflow, rows, tokens = self.needed.split((1, self.size, self.size))
        most = torch.stack((overflow[0], rows.max(), tokens.max()))
        self.needed.zero_()
        return most


def _dispatch_style(theirs, all_experts, options):
    class DispatchStyle(theirs):
        """Our movement, between transformers' slicing and gathering of what a TP group
        replicates."""

        def install_forward(self, module, ep_mesh, *, tp_mesh=None):
            experts = _Experts(ep_mesh, module.down_proj.shape[0], **options)
            all_experts[module] = experts

            def forward(hidden_states, top_k_index, top_k_weights):
                num_tokens = hidden_states.shape[0]
                tokens, _ = self.transform_inputs_pre_forward(
                    module, (hidden_states, top_k_index, top_k_weights), {}, ep_mesh,
                    tp_mesh=tp_mesh)
                y = parallel_experts_forward(experts, module, *tokens)
                return self.transform_output_post_forward(module, y, ep_mesh, tp_mesh=tp_mesh,
                                                          num_tokens=num_tokens)

            module.forward = forward
            if ep_mesh.size() == dist.get_world_size():
                _divide_gradients_once(module)
            return module

    return DispatchStyle()


def _divide_gradients_once(module):
    """Stops FSDP2 from dividing gradients twice. transformers makes it divide by fsdp_size and
    reduce by sums; if each expert is on one rank alone, torch (seen in 2.13) then divides twice. A
    sum over one rank needs no collective, so it need not be requested."""

    def before_forward(module, _args):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(False)
        hook.remove()

    hook = module.register_forward_pre_hook(before_forward)


def _shard_style(theirs):
    class ShardStyle(theirs):
        """transformers' style, extended to experts that do not divide evenly."""

        def shard_param(self, module, param, mesh):
            whole = module._parameters.get(param)
            if whole is None or whole.shape[0] % mesh.size() == 0:
                super().shard_param(module, param, mesh)
                return
            own = chunked(whole.shape[0], mesh.size()).experts_of(mesh.get_local_rank())
            module.num_experts = len(own)
            module._is_expert_parallel = True
            if not own:
                _let_fsdp_reduce_nothing()
            module._parameters[param] = torch.nn.Parameter(
                distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
                requires_grad=whole.requires_grad)

    return ShardStyle(Shard(0), shards_expert_dim=True)


@functools.lru_cache(maxsize=None)
def _let_fsdp_reduce_nothing():
    """Lets FSDP2 handle ranks without experts: the operator that packs the gradients of a module
    rejects tensors without elements, and such a rank has no others."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    theirs = _fsdp_collectives.foreach_reduce_scatter_copy_in

    @functools.wraps(theirs)
    def copy_in(unsharded_grads, reduce_scatter_input, world_size):
        if reduce_scatter_input.numel() > 0:
            theirs(unsharded_grads, reduce_scatter_input, world_size)

    _fsdp_collectives.foreach_reduce_scatter_copy_in = copy_in


def _weight_converter():
    from transformers.core_model_loading import WeightConverter
    return WeightConverter


def _let_ranks_load_nothing():
    """Lets ranks without experts load files with one tensor per expert. Stacking those fails on
    such ranks, so they get their empty part directly. Returns the function that was replaced."""
    theirs = _weight_converter().convert

    @functools.wraps(theirs)
    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        empty = _empty_part(model, layer_name) if loading_info is not None else None
        if empty is None:
            return theirs(self, layer_name, model=model, config=config, hf_quantizer=hf_quantizer,
                          loading_info=loading_info)
        self.materialize_tensors()  # there are none
        return {layer_name: empty}

    _weight_converter().convert = convert
    return theirs


def _empty_part(model, name):
    """Returns this rank's part of a parameter that is divided over ranks, if it has no elements."""
    try:
        parameter = model.get_parameter(name)
    except AttributeError:
        return None
    if not isinstance(parameter, DTensor) or parameter.to_local().numel() > 0:
        return None
    return torch.empty(parameter.to_local().shape, dtype=parameter.dtype,
                       device=parameter.device_mesh.device_type)
