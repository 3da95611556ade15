# SPDX-License-Identifier: Apache-2.0
"""Experts divided over ranks, as differentiable functions of tensors."""
import torch

from .._activations import DEFAULT_CONSTANTS, Activation
from .._library import InvalidArgument
from .._ranks import ExpertPlacement
from . import _functions
from ._functions import first_order, needs_gradient, wanted
from ._process_group import group_of, link_to, release
from ._shared_ops import Checking, dispatchers_over, of_number
from ._steps import note_plan

DEFAULT_TIMEOUT = 600.0


def chunked(num_experts, num_ranks):
    """Returns the placement of torch's Shard(0): ceil(E / ranks) experts on each rank until none
    are left, so that the last ranks may own fewer, or none."""
    each = -(-num_experts // num_ranks)
    return ExpertPlacement([expert // each for expert in range(num_experts)], num_ranks)


class _Closed:
    """Takes the place of dispatchers that were closed."""

    def __getattr__(self, _name):
        raise InvalidArgument("this ExpertParallel is closed")


class SharedPlan:
    """The destination of every pick of this rank's tokens, and the rows of this rank's experts.

    `tensor` [n] i32 holds all of it except two sizes: num_rows R of this rank's experts, including
    padding, and num_received D, the tokens that come to them, each once. The rows of an expert are
    those of rank 0's tokens, then rank 1's, and so on, whichever rank owns it.
    """

    def __init__(self, ranks, tensor, num_tokens, top_k, num_rows, num_received):
        self.ranks = ranks
        self.tensor = tensor
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.num_rows = num_rows
        self.num_received = num_received

    def check(self):
        """Raises the same InvalidArgument on every rank if ids were bad, or if a rank has more rows
        or tokens than a bounded plan has room for. Waits for a GPU."""
        self.ranks._dispatchers.check_plan(self.tensor, self.num_tokens, self.top_k, self.num_rows,
                                           self.num_received)

    @property
    def row_offsets(self):
        """[e + 1] i32: where the rows of each of this rank's experts begin."""
        return self._table("row_offsets", self.ranks.num_local_experts + 1)

    @property
    def group_rows(self):
        """[e] i32: the number of rows of each of this rank's experts, without padding."""
        return self._table("group_rows", self.ranks.num_local_experts)

    @property
    def slots(self):
        """[T, K] i32: the row of every pick on its owner, or −1 if there is none."""
        return self._picks(0)

    @property
    def target_ranks(self):
        """[T, K] i32: the rank that owns the expert of every pick, or −1 if there is none."""
        return self._picks(1)

    @property
    def needed(self):
        """[1 + 2 · ranks] i64: nonzero if some rank has no room; the rows that each rank needs; the
        tokens that each rank receives. The same on all ranks; does not wait."""
        size = self.ranks.size
        words = [self._table(name, 2 * count).view(torch.int64) for name, count in
                 (("overflow", 1), ("needed_rows", size), ("needed_tokens", size))]
        return torch.cat(words)

    def _picks(self, index):
        size = self.num_tokens * self.top_k
        first = self.ranks._dispatchers.tables["slots"] + index * ((size + 3) // 4 * 4)
        return self.tensor[first:first + size].view(self.num_tokens, self.top_k)

    def _table(self, name, size):
        first = self.ranks._dispatchers.tables[name]
        return self.tensor[first:first + size]


class ExpertParallel:
    """Experts divided over the ranks of a process group, or of a one-dimensional DeviceMesh.

    owners[e] is the rank of expert e; by default experts are divided as by torch's Shard(0). Ranks
    are processes of one host, each with a GPU or on the CPU. With `row_capacity`, buffers have that
    many rows on every rank, and `token_capacity` tokens (0: as many as rows), whatever the routing.
    Then nothing waits for a GPU, and plan.check() or run_step() report whether that was enough.
    Without it, buffers fit the routing, and plan() waits once to learn their sizes. If a rank does
    not arrive within `timeout` seconds, the others raise an error that names it.

    Every rank makes the same calls in the same order, with or without tokens. With one rank, the
    methods are plan, dispatch, combine and moe of this module.
    """

    def __init__(self, ranks, num_experts, *, owners=None, alignment=1, sentinels=False,
                 row_capacity=0, token_capacity=0, timeout=DEFAULT_TIMEOUT):
        self.group = group_of(ranks)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.placement = (chunked(num_experts, self.size) if owners is None else
                          ExpertPlacement(owners, self.size))
        if self.placement.num_experts != num_experts:
            raise InvalidArgument(f"owners names the ranks of {self.placement.num_experts} experts, "
                                  f"but there are {num_experts}")
        self.num_experts = num_experts
        self.alignment = alignment
        self.sentinels = sentinels
        self.num_local_experts = len(self.placement.experts_of(self.rank))
        self.is_reduced = True  # whether reduce_gradients() has seen all gradients
        self.has_stepped = True  # whether an optimizer has stepped since then
        self.set_capacity(row_capacity, token_capacity)
        self._dispatchers = None
        if self.size > 1:
            self._dispatchers = dispatchers_over(link_to(self.group, timeout), self.placement,
                                                 alignment, sentinels)
            self._dispatchers.num_users += 1

    def set_capacity(self, row_capacity, token_capacity=0):
        """Sets the capacities for later plans; they must be the same on all ranks. Rows are rounded
        up to the alignment. 0 makes plans exact."""
        if row_capacity < 0 or token_capacity < 0:
            raise InvalidArgument(f"row_capacity ({row_capacity}) and token_capacity "
                                  f"({token_capacity}) must not be negative")
        self.row_capacity = -(-row_capacity // self.alignment) * self.alignment
        self.token_capacity = token_capacity

    def plan(self, expert_ids):
        """Returns a plan for expert_ids [T, K], i32 or i64. −1 is no pick, and with `sentinels`
        neither is an id of num_experts or above. T may differ between ranks and be 0."""
        if self.size == 1:
            return _functions.plan(expert_ids, self.num_experts, alignment=self.alignment,
                                   sentinels=self.sentinels)
        sizes = self.row_capacity, self.token_capacity or self.row_capacity
        tensor = torch.ops.switchyard.shared_plan(expert_ids, self._number, self.row_capacity,
                                                  self.token_capacity)
        num_tokens, top_k = expert_ids.shape
        note_plan(tensor, expert_ids, self._number)
        if self.row_capacity == 0:
            sizes = [size.shape[0] for size in torch.ops.switchyard.shared_plan_sizes(
                tensor, self._number, num_tokens, top_k)]
        return SharedPlan(self, tensor, num_tokens, top_k, *sizes)

    def dispatch(self, plan, x):
        """Returns rows [R, H] of this rank's experts, from the tokens x [T, H] of all ranks.
        Padding is 0, and rows beyond those of the plan are undefined."""
        if self.size == 1:
            return _functions.dispatch(plan, x, exact=self.row_capacity == 0)
        return _Dispatch.apply(x, plan.tensor, self._number, plan.top_k, plan.num_rows,
                               plan.num_received)

    def combine(self, plan, rows, pick_weights):
        """Returns y [T, H] of this rank's tokens: y[t] = Σ_k pick_weights[t, k] · the row of pick
        k, in f32, k in order."""
        if self.size == 1:
            return _functions.combine(plan, rows, pick_weights)
        return _Combine.apply(rows, pick_weights.float(), plan.tensor, self._number,
                              plan.num_received)

    def moe(self, plan, x, pick_weights, gate_up, down, gate_up_bias=None, down_bias=None, *,
            activation=Activation.SWIGLU, constants=DEFAULT_CONSTANTS):
        """Runs tokens x [T, H] through their experts, on whichever rank, and combines the results;
        [T, H].

        Weights are those of this rank's experts, gate_up [e, 2I, H] and down [e, H, I]; their
        gradients are sums over the tokens of all ranks. The bits of y and of all gradients are
        those of one rank with all tokens.
        """
        weights = (gate_up, down, gate_up_bias, down_bias)
        if self.size == 1:
            return _functions.moe(plan, x, pick_weights, *weights, activation=activation,
                                  constants=constants)
        if not torch.compiler.is_compiling():
            with Checking(self._dispatchers, "forward"):
                constants = list(map(float, constants))
        keep = needs_gradient(x, pick_weights, *weights)
        if keep:
            self.is_reduced = False
        return _Moe.apply(x, pick_weights.float(), *weights, plan.tensor, self._number,
                          int(activation), list(map(float, constants)), plan.num_rows,
                          plan.num_received, keep)

    def host_syncs(self):
        """Returns how often the library has waited for a GPU here so far."""
        return 0 if self.size == 1 else self._dispatchers.host_syncs()

    def abort(self, reason):
        """Gives up on behalf of this rank: the other ranks raise an error with the reason."""
        if self.size > 1:
            self._dispatchers.link.communicator.abort(reason)

    def close(self):
        """Ends the use of this object; call it on all ranks. When the last one over a group is
        closed, the memory that its ranks share is freed, and after a failure the next one starts
        afresh."""
        dispatchers, self._dispatchers = self._dispatchers, _Closed()
        if self.size == 1 or isinstance(dispatchers, _Closed):
            return
        dispatchers.num_users -= 1
        if dispatchers.num_users == 0:
            dispatchers.close()
            dispatchers.link.dispatchers.pop((self.placement, self.alignment, self.sentinels))
        release(dispatchers.link)

    def __deepcopy__(self, _memo):
        return self  # copies of a model run over the same ranks

    @property
    def _number(self):
        return self._dispatchers.number


def _keep_ranks(ctx, ranks):
    """Keeps the ranks alive for backward, in case the program lets go of its ExpertParallel."""
    if not torch.compiler.is_compiling():
        ctx.dispatchers = of_number(ranks)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, ranks, top_k, num_rows, num_received):
        _keep_ranks(ctx, ranks)
        ctx.save_for_backward(plan)
        ctx.form = (ranks, top_k, x.shape[0], num_received)
        return torch.ops.switchyard.shared_dispatch(x, plan, ranks, top_k, num_rows, num_received)

    @staticmethod
    @first_order
    def backward(ctx, d_rows):
        plan, = ctx.saved_tensors
        d_x = torch.ops.switchyard.shared_combine(d_rows, None, plan, *ctx.form)
        return d_x, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, pick_weights, plan, ranks, num_received):
        _keep_ranks(ctx, ranks)
        ctx.save_for_backward(rows, pick_weights, plan)
        ctx.form = (ranks, num_received)
        num_tokens, top_k = pick_weights.shape
        return torch.ops.switchyard.shared_combine(rows, pick_weights, plan, ranks, top_k,
                                                   num_tokens, num_received)

    @staticmethod
    @first_order
    def backward(ctx, d_y):
        rows, pick_weights, plan = ctx.saved_tensors
        d_rows, d_weights = torch.ops.switchyard.shared_combine_backward(d_y, pick_weights, rows,
                                                                         plan, *ctx.form)
        return d_rows, d_weights, None, None, None


class _Moe(torch.autograd.Function):
    """Backward consumes the values between an expert's products; a second one recomputes them."""

    @staticmethod
    def forward(ctx, x, pick_weights, gate_up, down, gate_up_bias, down_bias, plan, ranks,
                activation, constants, num_rows, num_received, keep):
        _keep_ranks(ctx, ranks)
        ctx.ranks = ranks
        ctx.activation = (activation, constants)
        weights = (gate_up, down, gate_up_bias, down_bias)
        y, *kept = torch.ops.switchyard.shared_moe_forward(
            x, pick_weights, plan, ranks, *weights, activation, constants, num_rows, num_received,
            keep)
        ctx.save_for_backward(*weights, plan, *kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx, d_y):
        gate_up, down, gate_up_bias, down_bias, plan, *kept = ctx.saved_tensors
        frozen = not any(ctx.needs_input_grad[2:6])
        results = torch.ops.switchyard.shared_moe_backward(
            d_y, plan, ctx.ranks, *kept, gate_up, down, gate_up_bias, down_bias, *ctx.activation,
            frozen)
        return wanted(results, ctx.needs_input_grad[:6]) + (None,) * 7
