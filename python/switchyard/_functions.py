# SPDX-License-Identifier: Apache-2.0
"""One rank's plan, movement, experts and router as stateless functions of arrays.

T tokens of H values pick K of E experts each, whose matrices have I inner values. Arrays are
numpy's or anything with DLPack, all in the memory of one device: `device`, or the default device
where the arrays are. Results are numpy arrays, or switchyard.Array for bf16 and on GPUs.
"""
from __future__ import annotations

import ctypes
from typing import NamedTuple, Optional, Sequence, Tuple

from ._activations import DEFAULT_CONSTANTS, Activation
from ._arrays import (BF16, F32, I32, I64, AnyArray, Result, View, empty, require_form, view,
                      view_on)
from ._device import Device, default_device
from ._library import InvalidArgument, check, checked, library, words
from ._router import RouterForm

_REALS = (F32, BF16)


def _device_for(value: AnyArray, name: str, device: Optional[Device]) -> Tuple[Device, View]:
    if device is not None:
        return device, view_on(device, value, name)
    found = view(value, name)
    return default_device(found.place), found


def _pointer(memory: Optional[View]) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if memory is None else memory.pointer)


def _address(memory: Optional[View]) -> int:
    return 0 if memory is None else memory.pointer


class Plan:
    """The destination of every pick of a token: rows are ordered by expert, then by (token, k).

    `array` [n] i32 holds all of it. Each expert's rows begin at a multiple of `alignment`.
    """

    def __init__(self, array: Result, memory: View, device: Device, form: Tuple[int, ...]):
        self.array = array
        self.num_tokens, self.top_k, self.num_experts, self.alignment = form[:4]
        self.device = device
        self._memory = memory
        self._form = form

    @property
    def most_rows(self) -> int:
        """The number of rows that is enough for any routing."""
        return checked(library.switchyard_plan_most_rows(words(*self._form)))

    def num_rows(self) -> int:
        """Returns the number of rows that the experts use, including padding. Waits for a GPU."""
        rows = ctypes.c_int64()
        check(library.switchyard_plan_num_rows(*self._call(), ctypes.byref(rows)))
        return rows.value

    def check(self) -> None:
        """Raises InvalidArgument if the plan was made from bad ids. Waits for a GPU; on a CPU,
        plan() itself has raised."""
        check(library.switchyard_plan_check(*self._call()))

    @property
    def slots(self) -> Result:
        """[T, K] i32: the row of every pick, or −1 if there is none. A copy if on a GPU."""
        return self._table(0, self.num_tokens * self.top_k).reshape(self.num_tokens, self.top_k)

    @property
    def row_offsets(self) -> Result:
        """[E + 1] i32: where the rows of each expert begin. A copy if on a GPU."""
        return self._table(1, self.num_experts + 1)

    @property
    def group_rows(self) -> Result:
        """[E] i32: the number of rows of each expert, without padding. A copy if on a GPU."""
        return self._table(2, self.num_experts)

    @property
    def row_sources(self) -> Result:
        """[most_rows] i32: the pick t·K + k of each row; undefined for padding. A copy if on a GPU.
        """
        return self._table(3, self.most_rows)

    def _call(self) -> tuple:
        return (self.device._handle, self.device._stream, words(*self._form),
                _pointer(self._memory))

    def _table(self, index: int, size: int):
        tables = (ctypes.c_int64 * 4)()
        check(library.switchyard_plan_find_tables(words(*self._form), ctypes.byref(tables)))
        array = self.array.numpy() if self.device.kind == "cuda" else self.array
        return array[tables[index]:tables[index] + size]

    def _moved(self, dtype: int, hidden: int, num_rows: int) -> bytes:
        return words(*self._form, self._memory.pointer, dtype, hidden, num_rows)

    def _rows(self, exact: bool) -> int:
        return self.num_rows() if exact else self.most_rows

    def _tokens(self, value: AnyArray, name: str) -> View:
        tokens = view_on(self.device, value, name)
        require_form(tokens, name, _REALS, (self.num_tokens, None), "TH")
        return tokens

    def _picks(self, value: Optional[AnyArray], name: str) -> Optional[View]:
        if value is None:
            return None
        picks = view_on(self.device, value, name)
        require_form(picks, name, (F32,), (self.num_tokens, self.top_k), "TK")
        return picks

    def _some_rows(self, value: AnyArray, name: str, dtypes=_REALS, hidden=None) -> View:
        rows = view_on(self.device, value, name)
        require_form(rows, name, dtypes, (None, hidden), "RH")
        return rows


def plan(expert_ids: AnyArray, num_experts: int, *, alignment: int = 1, sentinels: bool = False,
         device: Optional[Device] = None) -> Plan:
    """Makes a Plan for expert_ids [T, K], i32 or i64; −1 is no pick.

    With `sentinels`, ids of `num_experts` and above are no pick either. Otherwise they are an
    error, which on a GPU, where nothing waits, only Plan.check() reports.
    """
    device, ids = _device_for(expert_ids, "expert_ids", device)
    require_form(ids, "expert_ids", (I32, I64), (None, None), "TK")
    form = (*ids.shape, int(num_experts), int(alignment), int(sentinels))
    size = checked(library.switchyard_plan_words(words(*form)))
    array, memory = empty(device, (size,), I32)
    check(library.switchyard_plan_make(device._handle, device._stream, words(*form), _pointer(ids),
                                       ctypes.c_int64(ids.dtype), _pointer(memory)))
    return Plan(array, memory, device, form)


def dispatch(plan: Plan, x: AnyArray, *, exact: bool = False) -> Result:
    """Returns rows [R, H] of tokens x [T, H]: row slots[t, k] is x[t], and padding is 0.

    R is plan.most_rows, or with `exact` plan.num_rows(), which waits for a GPU. Rows beyond those
    of the plan are undefined.
    """
    tokens = plan._tokens(x, "x")
    hidden = tokens.shape[1]
    result, rows = empty(plan.device, (plan._rows(exact), hidden), tokens.dtype)
    check(library.switchyard_dispatch(
        plan.device._handle, plan.device._stream,
        plan._moved(tokens.dtype, hidden, rows.shape[0]), _pointer(tokens), _pointer(rows)))
    return result


def combine(plan: Plan, rows: AnyArray, pick_weights: Optional[AnyArray] = None) -> Result:
    """Returns y [T, H]: y[t] = Σ_k pick_weights[t, k] · rows[slots[t, k]], in f32, k in order.

    rows are [R, H] as returned by dispatch(). pick_weights are [T, K] f32; without them every
    weight is 1, which makes this the gradient of dispatch().
    """
    given = plan._some_rows(rows, "rows")
    weights = plan._picks(pick_weights, "pick_weights")
    num_rows, hidden = given.shape
    result, y = empty(plan.device, (plan.num_tokens, hidden), given.dtype)
    check(library.switchyard_combine(
        plan.device._handle, plan.device._stream, plan._moved(given.dtype, hidden, num_rows),
        _pointer(given), _pointer(weights), _pointer(y)))
    return result


def combine_backward(plan: Plan, d_y: AnyArray, rows: AnyArray,
                     pick_weights: AnyArray) -> Tuple[Result, Result]:
    """Returns (d_rows [R, H], d_pick_weights [T, K] f32) of combine(plan, rows, pick_weights).

    Padding and rows beyond those of the plan are undefined.
    """
    given = plan._tokens(d_y, "d_y")
    kept = plan._some_rows(rows, "rows", (given.dtype,), given.shape[1])
    weights = plan._picks(pick_weights, "pick_weights")
    d_rows, d_rows_memory = empty(plan.device, kept.shape, kept.dtype)
    d_weights, d_weights_memory = empty(plan.device, (plan.num_tokens, plan.top_k), F32)
    check(library.switchyard_combine_backward(
        plan.device._handle, plan.device._stream,
        plan._moved(given.dtype, given.shape[1], kept.shape[0]), _pointer(given),
        _pointer(weights), _pointer(kept), _pointer(d_rows_memory), _pointer(d_weights_memory)))
    return d_rows, d_weights


class _Weights:
    """The experts' arrays, checked. All have one dtype, which is also that of the tokens."""

    def __init__(self, device: Device, tokens: View, gate_up: AnyArray, down: AnyArray,
                 gate_up_bias: Optional[AnyArray], down_bias: Optional[AnyArray],
                 activation: Activation, constants: Sequence[float]):
        self.device = device
        self.activation = Activation(activation)
        hidden, dtypes = tokens.shape[1], (tokens.dtype,)
        self.gate_up = view_on(device, gate_up, "gate_up")
        self.down = view_on(device, down, "down")
        require_form(self.down, "down", dtypes, (None, hidden, None), "EHI")
        self.num_experts, _, intermediate = self.down.shape
        self.inner_width = intermediate * (2 if self.activation.has_gate else 1)
        require_form(self.gate_up, "gate_up", dtypes, (self.num_experts, self.inner_width, hidden),
                     "EIH")
        if (gate_up_bias is None) != (down_bias is None):
            raise InvalidArgument("gate_up_bias and down_bias go together: one of them is missing")
        self.gate_up_bias = self._bias(gate_up_bias, "gate_up_bias", dtypes, self.inner_width)
        self.down_bias = self._bias(down_bias, "down_bias", dtypes, hidden)
        self.form = (hidden, intermediate, tokens.dtype, int(self.activation),
                     *map(float, constants))

    def _bias(self, value: Optional[AnyArray], name: str, dtypes: tuple,
              size: int) -> Optional[View]:
        if value is None:
            return None
        bias = view_on(self.device, value, name)
        require_form(bias, name, dtypes, (self.num_experts, size), "EI")
        return bias

    def _all(self) -> tuple:
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    @property
    def pointers(self) -> tuple:
        return tuple(map(_address, self._all()))

    def new_gradients(self) -> Tuple["ExpertsGradients", tuple]:
        made = [(None, None) if w is None else empty(self.device, w.shape, w.dtype)
                for w in self._all()]
        return (ExpertsGradients(*(array for array, _ in made)),
                tuple(_address(memory) for _, memory in made))


class ExpertsGradients(NamedTuple):
    """Gradients of the experts' weights, in their shapes and dtype; None where frozen or absent."""
    gate_up: Optional[Result]
    down: Optional[Result]
    gate_up_bias: Optional[Result]
    down_bias: Optional[Result]


class MoeGradients(NamedTuple):
    """The result of moe_backward(): d_x [T, H], d_pick_weights [T, K] f32, and the experts'
    gradients."""
    d_x: Result
    d_pick_weights: Result
    experts: ExpertsGradients


_FROZEN = (ExpertsGradients(None, None, None, None), (0, 0, 0, 0))


def _require_experts(plan: Plan, weights: _Weights) -> None:
    if weights.num_experts != plan.num_experts:
        raise InvalidArgument(f"gate_up and down have {weights.num_experts} experts, but the plan "
                              f"has {plan.num_experts}")


def experts(plan: Plan, rows: AnyArray, gate_up: AnyArray, down: AnyArray,
            gate_up_bias: Optional[AnyArray] = None, down_bias: Optional[AnyArray] = None, *,
            activation: Activation = Activation.SWIGLU,
            constants: Sequence[float] = DEFAULT_CONSTANTS) -> Result:
    """Applies each expert's two products to its rows [R, H], and returns [R, H].

    gate_up is [E, 2I, H] with the gates first ([E, I, H] without gates), and down is [E, H, I].
    Biases are [E, 2I] and [E, H].
    """
    given = plan._some_rows(rows, "rows")
    weights = _Weights(plan.device, given, gate_up, down, gate_up_bias, down_bias, activation,
                       constants)
    _require_experts(plan, weights)
    result, out = empty(plan.device, given.shape, given.dtype)
    check(library.switchyard_rows_forward(
        plan.device._handle, plan.device._stream,
        words(*plan._form, *weights.form, *weights.pointers, plan._memory.pointer, given.shape[0],
              given.pointer, 0), _pointer(out)))
    return result


def experts_backward(plan: Plan, d_out: AnyArray, rows: AnyArray, gate_up: AnyArray, down: AnyArray,
                     gate_up_bias: Optional[AnyArray] = None,
                     down_bias: Optional[AnyArray] = None, *,
                     activation: Activation = Activation.SWIGLU,
                     constants: Sequence[float] = DEFAULT_CONSTANTS,
                     frozen: bool = False) -> Tuple[Result, ExpertsGradients]:
    """Returns (d_rows [R, H], gradients of the weights) of experts(). Recomputes the inner values.

    `frozen` experts have no gradients. d_rows of padding and beyond the plan are undefined.
    """
    given = plan._some_rows(d_out, "d_out")
    kept = plan._some_rows(rows, "rows", (given.dtype,), given.shape[1])
    require_form(kept, "rows", (given.dtype,), given.shape, "RH")
    weights = _Weights(plan.device, given, gate_up, down, gate_up_bias, down_bias, activation,
                       constants)
    _require_experts(plan, weights)
    _, used_up = _copy_of(plan.device, kept)
    _, inner = empty(plan.device, (given.shape[0], weights.inner_width), given.dtype)
    d_rows, d_rows_memory = empty(plan.device, given.shape, given.dtype)
    gradients, pointers = _FROZEN if frozen else weights.new_gradients()
    check(library.switchyard_rows_backward(
        plan.device._handle, plan.device._stream,
        words(*plan._form, *weights.form, *weights.pointers, plan._memory.pointer, given.shape[0],
              used_up.pointer, inner.pointer),
        _pointer(given), _pointer(d_rows_memory), words(*pointers), ctypes.c_int64(1)))
    return d_rows, gradients


def _copy_of(device: Device, memory: View) -> Tuple[Result, View]:
    copy, target = empty(device, memory.shape, memory.dtype)
    check(library.switchyard_copy_on(device._handle, device._stream, _pointer(memory),
                                     _pointer(target), ctypes.c_int64(copy.nbytes)))
    return copy, target


def _moe_words(plan: Plan, x: View, picks: View, weights: _Weights, num_rows: int,
               inner: Optional[View]) -> bytes:
    return words(*plan._form, *weights.form, *weights.pointers, plan._memory.pointer, num_rows,
                 x.pointer, picks.pointer, _address(inner))


def moe(plan: Plan, x: AnyArray, pick_weights: AnyArray, gate_up: AnyArray, down: AnyArray,
        gate_up_bias: Optional[AnyArray] = None, down_bias: Optional[AnyArray] = None, *,
        activation: Activation = Activation.SWIGLU,
        constants: Sequence[float] = DEFAULT_CONSTANTS, exact: bool = False) -> Result:
    """Runs tokens x [T, H] through their experts and combines the results; [T, H].

    y[t] = Σ_k pick_weights[t, k] · expert(x[t]), summed in f32; pick_weights are [T, K] f32.
    Weights are as in experts(), and x has their dtype. `exact` waits for a GPU once, which saves
    memory where many ids are no pick.
    """
    tokens = plan._tokens(x, "x")
    picks = plan._picks(pick_weights, "pick_weights")
    weights = _Weights(plan.device, tokens, gate_up, down, gate_up_bias, down_bias, activation,
                       constants)
    _require_experts(plan, weights)
    result, y = empty(plan.device, tokens.shape, tokens.dtype)
    check(library.switchyard_moe_forward(
        plan.device._handle, plan.device._stream,
        _moe_words(plan, tokens, picks, weights, plan._rows(exact), None), _pointer(y)))
    return result


def moe_backward(plan: Plan, d_y: AnyArray, x: AnyArray, pick_weights: AnyArray, gate_up: AnyArray,
                 down: AnyArray, gate_up_bias: Optional[AnyArray] = None,
                 down_bias: Optional[AnyArray] = None, *,
                 activation: Activation = Activation.SWIGLU,
                 constants: Sequence[float] = DEFAULT_CONSTANTS, exact: bool = False,
                 frozen: bool = False) -> MoeGradients:
    """Returns the gradients of moe() for d_y [T, H]. Recomputes the inner values.

    `frozen` experts have no gradients.
    """
    tokens = plan._tokens(x, "x")
    given = view_on(plan.device, d_y, "d_y")
    require_form(given, "d_y", (tokens.dtype,), tokens.shape, "TH")
    picks = plan._picks(pick_weights, "pick_weights")
    weights = _Weights(plan.device, tokens, gate_up, down, gate_up_bias, down_bias, activation,
                       constants)
    _require_experts(plan, weights)
    num_rows = plan._rows(exact)
    _, inner = empty(plan.device, (num_rows, weights.inner_width), tokens.dtype)
    d_x, d_x_memory = empty(plan.device, tokens.shape, tokens.dtype)
    d_picks, d_picks_memory = empty(plan.device, picks.shape, F32)
    gradients, pointers = _FROZEN if frozen else weights.new_gradients()
    check(library.switchyard_moe_backward(
        plan.device._handle, plan.device._stream,
        _moe_words(plan, tokens, picks, weights, num_rows, inner),
        words(given.pointer, d_x_memory.pointer, d_picks_memory.pointer, *pointers, 1)))
    return MoeGradients(d_x, d_picks, gradients)


class _Routed:
    """The router's arrays, checked."""

    def __init__(self, device: Optional[Device], form: RouterForm, x: AnyArray, gate: AnyArray,
                 gate_bias: Optional[AnyArray], score_bias: Optional[AnyArray]):
        self.device, self.x = _device_for(x, "x", device)
        require_form(self.x, "x", _REALS, (None, None), "TH")
        self.gate = view_on(self.device, gate, "gate")
        require_form(self.gate, "gate", _REALS, (form.num_experts, self.x.shape[1]), "EH")
        self.gate_bias = self._of_experts(gate_bias, "gate_bias", form, (self.gate.dtype,))
        self.score_bias = self._of_experts(score_bias, "score_bias", form, (F32,))
        if (form.bias_enters is None) != (score_bias is None):
            raise InvalidArgument(f"bias_enters is {form.bias_enters!r}, but a score_bias was "
                                  f"{'not ' if score_bias is None else ''}given")
        self.picks = (self.x.shape[0], form.top_k)
        self.words = words(*form.words, *self.x.shape, self.x.dtype, self.gate.dtype,
                           *map(_address, (self.x, self.gate, self.gate_bias, self.score_bias)))

    def _of_experts(self, value: Optional[AnyArray], name: str, form: RouterForm,
                    dtypes: tuple) -> Optional[View]:
        if value is None:
            return None
        memory = view_on(self.device, value, name)
        require_form(memory, name, dtypes, (form.num_experts,), "E")
        return memory


class Routing(NamedTuple):
    """The result of route()."""
    expert_ids: Result  # [T, K] i32; −1 is no pick
    pick_weights: Result  # [T, K] f32
    first_non_finite: Result  # [1] i64: the first token without finite logits, or −1


def route(x: AnyArray, gate: AnyArray, form: RouterForm, *, gate_bias: Optional[AnyArray] = None,
          score_bias: Optional[AnyArray] = None, device: Optional[Device] = None) -> Routing:
    """Chooses the experts of every token x [T, H] and their weights.

    gate is [E, H], gate_bias [E] in its dtype, score_bias [E] f32. A token whose logits are not
    finite gets no picks.
    """
    args = _Routed(device, form, x, gate, gate_bias, score_bias)
    ids, ids_memory = empty(args.device, args.picks, I32)
    weights, weights_memory = empty(args.device, args.picks, F32)
    non_finite, non_finite_memory = empty(args.device, (1,), I64)
    check(library.switchyard_route(
        args.device._handle, args.device._stream, args.words, _pointer(ids_memory),
        _pointer(weights_memory), _pointer(non_finite_memory)))
    return Routing(ids, weights, non_finite)


class RouteGradients(NamedTuple):
    """The result of route_backward()."""
    d_x: Result  # [T, H]
    d_gate: Result  # [E, H] f32
    d_gate_bias: Optional[Result]  # [E] f32


def route_backward(d_pick_weights: AnyArray, expert_ids: AnyArray, x: AnyArray, gate: AnyArray,
                   form: RouterForm, *, gate_bias: Optional[AnyArray] = None,
                   score_bias: Optional[AnyArray] = None,
                   device: Optional[Device] = None) -> RouteGradients:
    """Returns the gradients of route() through its weights. d_pick_weights [T, K] f32 are the
    gradients of the picks expert_ids [T, K] i32. Recomputes the scores."""
    args = _Routed(device, form, x, gate, gate_bias, score_bias)
    given = view_on(args.device, d_pick_weights, "d_pick_weights")
    require_form(given, "d_pick_weights", (F32,), args.picks, "TK")
    ids = view_on(args.device, expert_ids, "expert_ids")
    require_form(ids, "expert_ids", (I32,), args.picks, "TK")
    d_x, d_x_memory = empty(args.device, args.x.shape, args.x.dtype)
    d_gate, d_gate_memory = empty(args.device, args.gate.shape, F32)
    d_bias, d_bias_memory = ((None, None) if gate_bias is None
                             else empty(args.device, (form.num_experts,), F32))
    check(library.switchyard_route_backward(
        args.device._handle, args.device._stream, args.words,
        words(ids.pointer, given.pointer, d_x_memory.pointer, d_gate_memory.pointer,
              _address(d_bias_memory))))
    return RouteGradients(d_x, d_gate, d_bias)
