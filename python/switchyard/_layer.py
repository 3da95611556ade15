# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer over the ranks of a communicator, forward and backward."""
from __future__ import annotations

import ctypes
import dataclasses
import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ._activations import DEFAULT_CONSTANTS, Activation
from ._arrays import (F32, I32, NAMES, NO_TENSOR, AnyArray, Result, View, empty, view_on,
                      zeros_like)
from ._device import Device, default_device, num_cores
from ._handles import Handle
from ._library import _KINDS, Error, InvalidArgument, check, library, words
from ._ranks import Communicator, ExpertPlacement
from ._router import RouterForm

library.switchyard_saved_bytes.restype = ctypes.c_int64
library.switchyard_layer_row_capacity.restype = ctypes.c_int64
_STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FIELDS = ("gate", "gate_bias", "score_bias", "gate_up", "down", "gate_up_bias", "down_bias",
           "shared_gate_up", "shared_down")


@dataclasses.dataclass
class MoeWeights:
    """One rank's part of a layer: its weights, or their gradients.

    The router and the shared expert are the same on every rank. The e routed experts are those of
    the rank, in ascending order of id. With a gate, the gates come before the ups.
    """

    gate: Optional[AnyArray] = None  # [E, H]
    gate_up: Optional[AnyArray] = None  # [e, 2I, H], or [e, I, H] without a gate
    down: Optional[AnyArray] = None  # [e, H, I]
    gate_bias: Optional[AnyArray] = None  # [E]
    score_bias: Optional[AnyArray] = None  # [E] f32; not in gradients
    gate_up_bias: Optional[AnyArray] = None  # [e, 2I] or [e, I]
    down_bias: Optional[AnyArray] = None  # [e, H]
    shared_gate_up: Optional[AnyArray] = None  # [2S, H] or [S, H]
    shared_down: Optional[AnyArray] = None  # [H, S]

    def views(self, device: Device, *, writable: bool = False) -> Dict[str, Optional[View]]:
        return {name: None if value is None else view_on(device, value, name, writable=writable)
                for name, value in ((name, getattr(self, name)) for name in _FIELDS)}


def pack_weights(views: Dict[str, Optional[View]]) -> bytes:
    """Returns a switchyard_layer_weights."""
    return b"".join(_pack(views[name]) for name in _FIELDS)


def _pack(memory: Optional[View]) -> bytes:
    return NO_TENSOR if memory is None else memory.pack


@dataclasses.dataclass(frozen=True)
class Sizing:
    """The number of rows in a rank's buffers: what the routing needs (`exact`), or a bound.

    With `drop`, rows that do not fit are left out and counted. Otherwise MoeLayer.check() raises,
    and run_step() runs the step again. A `token_capacity` of 0 means as many tokens as rows.
    """

    row_capacity: int = 0
    token_capacity: int = 0
    drop: bool = False

    @staticmethod
    def exact() -> "Sizing":
        return Sizing()

    @staticmethod
    def bounded(row_capacity: int, *, drop: bool = False, token_capacity: int = 0) -> "Sizing":
        if row_capacity < 1:
            raise InvalidArgument(f"row_capacity ({row_capacity}) must be positive")
        return Sizing(row_capacity, token_capacity, drop)


class LayerGradients(NamedTuple):
    """The result of MoeLayer.backward()."""
    d_x: Result  # [T, H]
    d_expert_weights: Result  # [T, K] f32: gradients of the routing weights
    # The router and the shared expert: over this rank's tokens. The experts: over all ranks'
    # tokens.
    weights: MoeWeights


class PickCounts(NamedTuple):
    """Counts of picks in training."""
    picks: np.ndarray  # [E] i64: assignments to each expert, before capacity
    num_tokens: int  # without padding


class SavedForBackward:
    """The values that a training forward keeps for its backward.

    x is not copied: its memory must stay unchanged until then.
    """

    def __init__(self, pointer: ctypes.c_void_p, layer: "MoeLayer", x: View):
        self._handle = Handle(pointer, library.switchyard_saved_free, "SavedForBackward")
        self._layer = layer
        self._x = x

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that are held, including x."""
        with self._handle as pointer:
            return library.switchyard_saved_bytes(pointer)

    def routing(self) -> Tuple[Result, Result]:
        """Returns (expert_ids [T, K] i32, weights [T, K] f32), as they were before capacity."""
        shape = (self._x.shape[0], self._layer.router.top_k)
        ids, ids_memory = empty(self._layer.device, shape, I32)
        weights, weights_memory = empty(self._layer.device, shape, F32)
        with self._handle as pointer:
            check(library.switchyard_saved_routing(pointer, self._layer.device._stream,
                                                   ids_memory.pack, weights_memory.pack))
        return ids, weights

    def losses(self) -> Dict[str, float]:
        """Returns {"balance": …, "z": …}, with 0 for losses that are off. Waits for a GPU."""
        balance, z = ctypes.c_double(), ctypes.c_double()
        with self._handle as pointer:
            check(library.switchyard_saved_losses(pointer, ctypes.byref(balance), ctypes.byref(z)))
        return {"balance": balance.value, "z": z.value}

    def close(self) -> None:
        """Frees the memory. Backward is no longer possible."""
        self._handle.close()


def _index(value: str, choices: Sequence[str], name: str) -> int:
    if value not in choices:
        raise InvalidArgument(f"{name} is {value!r}, but must be one of {', '.join(choices)}")
    return choices.index(value)


class MoeLayer:
    """An MoE layer whose experts are divided over the ranks of a communicator.

    The constructor, forward and backward are collective: every rank calls them in the same order,
    with or without tokens, and the number of tokens T may differ. y, d_x, d_expert_weights and the
    experts' gradients have the same bits for any number of ranks of `comm` and of threads, unless
    an option says otherwise. Gradients that are then summed over data-parallel copies agree to
    rounding.

    `router` is a RouterForm, or the name of a preset together with num_experts and top_k.
    `placement` is contiguous by default. `keep` selects what a training forward keeps for backward:
    "rows", "activations" (rows are dispatched again) or "nothing" (inner values are also
    recomputed). `batch` is the group whose tokens make up the batch, for everything that is
    "global"; by default it is `comm`. Ranks may share a `device`: each computes on its own device
    of the same kind.
    """

    def __init__(self, comm: Communicator, *, hidden: int, intermediate: int,
                 router: Union[RouterForm, str] = "mixtral", num_experts: Optional[int] = None,
                 top_k: Optional[int] = None, placement: Optional[ExpertPlacement] = None,
                 dtype: str = "float32", activation: Activation = Activation.SWIGLU,
                 constants: Sequence[float] = DEFAULT_CONSTANTS, weight_stage: str = "output",
                 shared_intermediate: int = 0,
                 shared_activation: Activation = Activation.SWIGLU, balance_loss: bool = False,
                 z_loss: bool = False, loss_scores: str = "as_routed", loss_scope: str = "global",
                 capacity_factor: float = 0.0, capacity_rule: str = "first_come",
                 gradient_scale: str = "off", sizing: Sizing = Sizing(), alignment: int = 1,
                 mover: str = "automatic", combine: str = "per_assignment", keep: str = "rows",
                 sentinels: bool = False, batch: Optional[Communicator] = None,
                 device: Optional[Device] = None):
        self.comm = comm
        self._batch = batch
        self._told = tuple(c for c in (comm, batch) if c is not None)
        with _Telling(self._told, "MoeLayer"):
            self.router = _router_form(router, num_experts, top_k)
            self.placement = placement or ExpertPlacement.contiguous(self.router.num_experts,
                                                                     comm.size)
            self.device = device or default_device(threads=max(1, num_cores() // comm.size))
            self.hidden, self.intermediate = int(hidden), int(intermediate)
            self.shared_intermediate = int(shared_intermediate)
            self.activation = Activation(activation)
            self.shared_activation = Activation(shared_activation)
            self.dtype = dtype
            form = words(
                self.hidden, self.intermediate, _index(dtype, NAMES[:2], "dtype"),
                int(self.activation), *map(float, constants), *self.router.words,
                _index(weight_stage, ("output", "activation", "input"), "weight_stage"),
                self.shared_intermediate, int(self.shared_activation), int(balance_loss),
                _index(loss_scores, ("as_routed", "shares"), "loss_scores"), int(z_loss),
                _index(loss_scope, ("global", "rank"), "loss_scope"), float(capacity_factor),
                _index(capacity_rule, ("first_come", "highest_weight"), "capacity_rule"),
                _index(gradient_scale, ("off", "rank", "global"), "gradient_scale"),
                sizing.row_capacity, sizing.token_capacity, int(sizing.drop), int(alignment),
                _index(mover, ("automatic", "direct", "packed", "peer"), "mover"),
                _index(combine, ("per_assignment", "pre_reduced"), "combine"),
                _index(keep, ("rows", "activations", "nothing"), "keep"), int(sentinels))
        self._handle = Handle(self._make(form), library.switchyard_layer_free, "layer")

    def _make(self, form: bytes) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        batch = Handle(ctypes.c_void_p(), lambda _: None, "") if self._batch is None \
            else self._batch._handle
        with self.comm._handle as comm, batch as batch_pointer:
            check(library.switchyard_layer_make(comm, batch_pointer, self.placement.pack, form,
                                                self.device._handle, ctypes.byref(pointer)))
        return pointer

    def forward(self, weights: MoeWeights, x: AnyArray, *, expert_ids: Optional[AnyArray] = None,
                expert_weights: Optional[AnyArray] = None,
                valid: Optional[AnyArray] = None) -> Result:
        """Returns y [T, H] of x [T, H], for inference: nothing is kept.

        expert_ids [T, K], i32 or i64, replay a choice; −1 is no pick. With expert_weights [T, K]
        f32 as well, the router is not used. valid [T] i32 marks padding with 0; the rows of y for
        it are 0.
        """
        y, _, _ = self._forward(weights, (x, expert_ids, expert_weights, valid), training=False)
        return y

    def forward_training(self, weights: MoeWeights, x: AnyArray, *,
                         expert_ids: Optional[AnyArray] = None,
                         expert_weights: Optional[AnyArray] = None,
                         valid: Optional[AnyArray] = None) -> Tuple[Result, SavedForBackward]:
        """Like forward(), but returns (y [T, H], the values that backward needs)."""
        y, saved, memory = self._forward(weights, (x, expert_ids, expert_weights, valid),
                                         training=True)
        return y, SavedForBackward(saved, self, memory)

    def _forward(self, weights: MoeWeights, given: tuple,
                 training: bool) -> Tuple[Result, ctypes.c_void_p, View]:
        with _Telling(self._told, "MoeLayer.forward"):
            names = ("x", "expert_ids", "expert_weights", "valid")
            views = [None if value is None else view_on(self.device, value, name)
                     for name, value in zip(names, given)]
            if views[0] is None:
                raise InvalidArgument("x is None, but must be an array [T,H]")
            weight_views = weights.views(self.device)
            y, y_memory = empty(self.device, views[0].shape, NAMES.index(self.dtype))
        saved = ctypes.c_void_p()
        with self._handle as pointer:
            check(library.switchyard_layer_forward(
                pointer, self.device._stream, pack_weights(weight_views),
                b"".join(map(_pack, views)), y_memory.pack,
                ctypes.byref(saved) if training else None))
        return y, saved, views[0]

    def backward(self, weights: MoeWeights, saved: SavedForBackward, d_y: AnyArray, *,
                 d_balance_loss: float = 0.0, d_z_loss: float = 0.0,
                 into: Optional[MoeWeights] = None, accumulate: bool = False) -> LayerGradients:
        """Returns the gradients of a training forward with these weights, given d_y [T, H].

        It consumes `saved`. Gradients have the dtypes of the weights, or are written to the arrays
        of `into`, which may be f32 instead. With `accumulate` they are added to what is there.
        """
        with _Telling(self._told, "MoeLayer.backward"):
            if accumulate and into is None:
                raise InvalidArgument("accumulate is set, but there is no `into` to add to")
            given = view_on(self.device, d_y, "d_y")
            weight_views = weights.views(self.device)
            d_x, d_x_memory = empty(self.device, saved._x.shape, saved._x.dtype)
            d_picks, d_picks_memory = empty(self.device,
                                            (saved._x.shape[0], self.router.top_k), F32)
            gradients, views = self._gradients(weight_views, into)
        with self._handle as pointer, saved._handle as saved_pointer:
            check(library.switchyard_layer_backward(
                pointer, self.device._stream, pack_weights(weight_views), saved_pointer,
                given.pack + words(float(d_balance_loss), float(d_z_loss)) + d_x_memory.pack +
                d_picks_memory.pack + pack_weights(views) + words(int(accumulate))))
        return LayerGradients(d_x, d_picks, gradients)

    def _gradients(self, weights: Dict[str, Optional[View]], into: Optional[MoeWeights]
                   ) -> Tuple[MoeWeights, Dict[str, Optional[View]]]:
        if into is not None:
            return into, into.views(self.device, writable=True)
        made = {name: zeros_like(self.device, memory) for name, memory in weights.items()
                if memory is not None and name != "score_bias"}
        return (MoeWeights(**{name: array for name, (array, _) in made.items()}),
                {name: made[name][1] if name in made else None for name in _FIELDS})

    def zeros(self, *, biases: bool = False) -> MoeWeights:
        """Returns this rank's weights, all 0, to be filled or to receive gradients."""
        num_experts = self.router.num_experts
        local = len(self.placement.experts_of(self.comm.rank))
        width = self.intermediate * (2 if self.activation.has_gate else 1)
        shapes: Dict[str, Tuple[int, ...]] = {
            "gate": (num_experts, self.hidden), "gate_up": (local, width, self.hidden),
            "down": (local, self.hidden, self.intermediate)}
        if biases:
            shapes.update(gate_bias=(num_experts,), gate_up_bias=(local, width),
                          down_bias=(local, self.hidden))
        if self.router.bias_enters is not None:
            shapes["score_bias"] = (num_experts,)
        if self.shared_intermediate > 0:
            parts = 2 if self.shared_activation.has_gate else 1
            shapes["shared_gate_up"] = (parts * self.shared_intermediate, self.hidden)
            shapes["shared_down"] = (self.hidden, self.shared_intermediate)
        dtype = NAMES.index(self.dtype)
        made = {name: zeros_like(self.device,
                                 View(0, shape, F32 if name == "score_bias" else dtype,
                                      self.device.place, False, None))
                for name, shape in shapes.items()}
        return MoeWeights(**{name: array for name, (array, _) in made.items()})

    def stats(self) -> Dict[str, Any]:
        """Returns statistics of the last forward and of the backward after it. Waits for a GPU.

        The keys are rows_by_expert, bytes_by_expert [E]; rows_by_rank, bytes_by_rank,
        dropped_by_rank, waited_for [ranks]; over_capacity, overflow, bytes_on_wire; forward and
        backward, which are lists of (stage, seconds).
        """
        stats = self._json("stats")
        for stages in ("forward", "backward"):
            stats[stages] = [tuple(stage) for stage in stats[stages]]
        return stats

    def plan_status(self) -> Dict[str, Any]:
        """Returns the status of the last forward's plan, for bounded sizing: overflow, bad_ids,
        non_finite and their messages, available_rows, needed_rows [ranks], dropped [ranks]. Waits
        for a GPU.
        """
        return self._json("plan_status")

    def check(self) -> None:
        """Raises the same InvalidArgument on every rank if plan_status() reports bad ids, logits
        that are not finite, or an overflow that is not to be dropped."""
        with self._handle as pointer:
            check(library.switchyard_layer_check(pointer))

    @property
    def row_capacity(self) -> int:
        """The number of rows that a rank has room for; 0 with exact sizing. run_step() may
        increase it."""
        with self._handle as pointer:
            return library.switchyard_layer_row_capacity(pointer)

    def pick_counts(self) -> PickCounts:
        """Returns the picks that this rank's backwards have counted since the last
        take_pick_counts()."""
        return self._pick_counts(0)

    def take_pick_counts(self) -> PickCounts:
        """Returns the picks counted on all ranks of the batch, and resets the counts.
        Collective."""
        return self._pick_counts(1)

    def close(self) -> None:
        """Frees the layer's memory. Further calls raise InvalidArgument."""
        self._handle.close()

    def __enter__(self) -> "MoeLayer":
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def _pick_counts(self, take: int) -> PickCounts:
        picks = np.zeros(self.router.num_experts, np.int64)
        num_tokens = ctypes.c_int64()
        with self._handle as pointer:
            check(library.switchyard_layer_pick_counts(
                pointer, ctypes.c_int64(take), ctypes.c_void_p(picks.ctypes.data),
                ctypes.byref(num_tokens)))
        return PickCounts(picks, num_tokens.value)

    def _json(self, name: str) -> Dict[str, Any]:
        text = ctypes.c_char_p()
        with self._handle as pointer:
            check(getattr(library, f"switchyard_layer_{name}")(pointer, ctypes.byref(text)))
            return json.loads(text.value)


class _Telling:
    """Tells other ranks of an error before a library call, so that none waits for this rank."""

    def __init__(self, comms: Tuple[Communicator, ...], operation: str):
        self._comms = comms
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: Optional[BaseException], _trace: Any) -> None:
        if error is not None:
            for comm in self._comms:
                comm._tell(self._operation, error)


def _router_form(router: Union[RouterForm, str], num_experts: Optional[int],
                 top_k: Optional[int]) -> RouterForm:
    if isinstance(router, RouterForm):
        if num_experts is not None or top_k is not None:
            raise InvalidArgument("num_experts and top_k are only for a router given by name, but "
                                  f"{router} was given")
        return router
    if num_experts is None or top_k is None:
        raise InvalidArgument(f"router {router!r} needs num_experts ({num_experts}) and top_k "
                              f"({top_k})")
    return RouterForm.preset(router, num_experts, top_k)


def run_step(layers: Sequence[MoeLayer], step: Callable[[], Any]) -> bool:
    """Runs step(). If a layer of bounded sizing overflows in it on any rank, runs the step again with
    exact sizing and grows the layer's capacity. Returns whether it ran again. Collective.

    step() must be repeatable: it overwrites its results, and leaves optimizer steps and
    take_pick_counts() to the code that follows. `layers` must list all bounded layers that it runs.
    """
    raised: List[BaseException] = []

    def run(_context: Any) -> int:
        try:
            step()
            return 0
        except BaseException as error:  # pylint: disable=broad-except
            raised[:] = [error]
            return library.switchyard_fail(_kind_of(error), str(error).encode())

    callback = _STEP(run)
    ran_again = ctypes.c_int64()
    with _All([layer._handle for layer in layers]) as pointers:
        all_layers = (ctypes.c_void_p * max(len(pointers), 1))(*[p.value for p in pointers])
        result = library.switchyard_run_step(all_layers, ctypes.c_int64(len(pointers)), callback,
                                             None, ctypes.byref(ran_again))
    if result != 0 and raised and not isinstance(raised[0], Error):
        raise raised[0]
    check(result)
    return bool(ran_again.value)


def _kind_of(error: BaseException) -> int:
    return next((number for number, kind in _KINDS.items() if isinstance(error, kind)), 8)


class _All:
    """Holds several handles in use."""

    def __init__(self, handles: Sequence[Handle]):
        self._handles = handles
        self._entered: List[Handle] = []

    def __enter__(self) -> List[ctypes.c_void_p]:
        pointers = []
        try:
            for handle in self._handles:
                pointers.append(handle.__enter__())
                self._entered.append(handle)
        except BaseException:
            self.__exit__()
            raise
        return pointers

    def __exit__(self, *_error: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__()
