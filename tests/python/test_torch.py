# SPDX-License-Identifier: Apache-2.0
"""The torch operators and functions on a CPU, and on a GPU where there is one."""
import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

import switchyard
import switchyard.torch as st
from switchyard.torch import Activation, _checks, _ops

T, K, E, H, I = 29, 3, 6, 32, 24
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


class Problem:
    """Tokens, their picks, and experts; the gradients of a fixed loss."""

    def __init__(self, device, dtype=torch.float32, num_tokens=T, biases=False):
        random = torch.Generator().manual_seed(1)

        def tensor(*shape, scale=1.0):
            values = scale * torch.randn(*shape, generator=random)
            return values.to(device, dtype).requires_grad_()

        self.ids = torch.stack([torch.randperm(E, generator=random)[:K]
                                for _ in range(num_tokens)] or
                               [torch.empty(K, dtype=torch.int64)])[:num_tokens].to(device)
        if num_tokens > 3:
            self.ids[3, 1] = -1
        self.x = tensor(num_tokens, H)
        self.d_y = tensor(num_tokens, H).detach()
        self.weights = torch.rand(num_tokens, K, generator=random).to(device).requires_grad_()
        self.gate_up = tensor(E, 2 * I, H, scale=H**-0.5)
        self.down = tensor(E, H, I, scale=I**-0.5)
        self.biases = (tensor(E, 2 * I), tensor(E, H)) if biases else (None, None)

    @property
    def leaves(self):
        given = (self.x, self.weights, self.gate_up, self.down, *self.biases)
        return [t for t in given if t is not None]

    def experts(self):
        return (self.gate_up, self.down, *self.biases)

    def run(self, function, **options):
        """y and all gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        y = function(self, **options)
        y.backward(self.d_y)
        return [y.detach()] + [leaf.grad for leaf in self.leaves]


def with_moe(problem, alignment=1, exact=False):
    plan = st.plan(problem.ids, E, alignment=alignment)
    return st.moe(plan, problem.x, problem.weights, *problem.experts(), exact=exact)


def with_parts(problem, alignment=1, exact=False):
    plan = st.plan(problem.ids, E, alignment=alignment)
    rows = st.dispatch(plan, problem.x, exact=exact)
    return st.combine(plan, st.experts(plan, rows, *problem.experts()), problem.weights)


def with_torch(problem):
    """The same, pick by pick."""
    y = []
    gate_up_bias, down_bias = problem.biases
    for t in range(problem.x.shape[0]):
        total = torch.zeros(H, device=problem.x.device)
        for k in range(K):
            e = problem.ids[t, k].item()
            if e < 0:
                continue
            inner = problem.gate_up[e] @ problem.x[t]
            inner = inner if gate_up_bias is None else inner + gate_up_bias[e]
            gate, up = inner.chunk(2)
            out = problem.down[e] @ (F.silu(gate) * up)
            out = out if down_bias is None else out + down_bias[e]
            total = total + problem.weights[t, k] * out.float()
        y.append(total.to(problem.x.dtype))
    return torch.stack(y) if y else problem.x * 0 + sum(w.sum() * 0 for w in problem.leaves)


def assert_near(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("form", [with_moe, with_parts])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("exact", [False, True])
def test_equals_torch(device, biases, form, alignment, exact):
    problem = Problem(device, biases=biases)
    actual = problem.run(form, alignment=alignment, exact=exact)
    assert_near(actual, problem.run(with_torch), 2e-6)


def test_bfloat16_is_near(device):
    problem = Problem(device, torch.bfloat16)
    assert_near(problem.run(with_moe), problem.run(with_torch), 2e-2)


@pytest.mark.parametrize("form", [with_moe, with_parts])
def test_no_tokens(device, form):
    problem = Problem(device, num_tokens=0)
    y, *gradients = problem.run(form)
    assert y.shape == (0, H)
    assert all(torch.count_nonzero(g) == 0 for g in gradients)


def test_bits_do_not_depend_on_other_tokens(device):
    """A token's result is the same whatever tokens come with it."""
    problem = Problem(device)
    with torch.no_grad():
        whole = with_moe(problem)
        plan = st.plan(problem.ids[5:12], E)
        part = st.moe(plan, problem.x[5:12], problem.weights[5:12], *problem.experts())
    if device == "cpu":  # where a group's rows go through the same panels
        assert_near([part], [whole[5:12]], 1e-6)
    else:
        assert torch.equal(part, whole[5:12])


def test_runs_are_equal(device):
    problem = Problem(device)
    assert all(map(torch.equal, problem.run(with_moe), problem.run(with_moe)))


def test_backward_twice(device):
    """The first backward uses up what forward kept; the second computes it again."""
    for form in (with_moe, with_parts):
        problem = Problem(device)
        y = form(problem)
        first = torch.autograd.grad(y, problem.leaves, problem.d_y, retain_graph=True)
        second = torch.autograd.grad(y, problem.leaves, problem.d_y)
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward_twice_when_compiled(device, backend):
    problem = Problem(device)
    y = torch.compile(with_moe, backend=backend)(problem)
    first = torch.autograd.grad(y, problem.leaves, problem.d_y, retain_graph=True)
    second = torch.autograd.grad(y, problem.leaves, problem.d_y)
    assert all(map(torch.equal, first, second))


def test_double_backward_is_an_error(device):
    problem = Problem(device)
    y = with_moe(problem)
    d_x, = torch.autograd.grad(y.sum(), problem.x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        d_x.sum().backward()


def test_frozen_experts_get_no_gradient(device):
    problem = Problem(device)
    expected = problem.run(with_moe)
    problem.gate_up.requires_grad_(False)
    problem.down.requires_grad_(False)
    actual = problem.run(with_moe)
    assert actual[3] is None and actual[4] is None
    assert all(map(torch.equal, actual[:3], expected[:3]))


def test_views_and_strides(device):
    problem = Problem(device)
    expected = problem.run(with_moe)
    wide = torch.zeros(T, 2 * H, device=device)
    wide[:, ::2] = problem.x.detach()
    problem.x = wide[:, ::2].requires_grad_()
    problem.down = problem.down.detach().mT.contiguous().mT.requires_grad_()
    problem.weights = problem.weights.detach().t().contiguous().t().requires_grad_()
    assert all(map(torch.equal, problem.run(with_moe), expected))


def test_plan_tables(device):
    problem = Problem(device)
    plan = st.plan(problem.ids, E, alignment=8)
    counts = torch.bincount(problem.ids[problem.ids >= 0], minlength=E)
    assert torch.equal(plan.group_rows.long(), counts)
    padded = (counts + 7) // 8 * 8
    assert torch.equal(plan.row_offsets[1:].long(), padded.cumsum(0))
    assert plan.num_rows() == padded.sum().item() <= plan.most_rows
    slots = plan.slots
    assert torch.equal(slots == -1, problem.ids == -1)
    flat = slots[slots >= 0].long()
    assert torch.equal(plan.row_sources[flat].long(), (slots.flatten() >= 0).nonzero()[:, 0])


@pytest.mark.parametrize("tokens, top_k, experts, alignment",
                         [(0, 1, 1, 1), (1, 2, 3, 1), (29, 3, 6, 16), (4096, 8, 128, 128)])
def test_sizes_are_the_librarys(tokens, top_k, experts, alignment):
    form = _ops._plan_of(tokens, top_k, experts, alignment)
    library = switchyard._library.library
    assert _checks.plan_words(tokens, top_k, experts,
                           alignment) == library.switchyard_plan_words(form)
    assert _checks.most_rows(tokens, top_k, experts,
                          alignment) == library.switchyard_plan_most_rows(form)


def test_sentinels(device):
    problem = Problem(device)
    expected = problem.run(with_moe)
    ids = problem.ids.clone()
    ids[ids < 0] = E + 4
    plan = st.plan(ids, E, sentinels=True)
    actual = problem.run(lambda p: st.moe(plan, p.x, p.weights, *p.experts()))
    assert all(map(torch.equal, actual, expected))


def test_bad_ids_are_named(device):
    problem = Problem(device)
    problem.ids[7, 2] = E
    with pytest.raises(switchyard.InvalidArgument,
                       match=rf"expert_ids\[7,2\] is {E}, which is neither -1 nor an expert"):
        st.plan(problem.ids, E).check()


@pytest.mark.parametrize("change, words", [
    (lambda p: {"x": p.x[:5]}, r"x is \[5, 32\], but the plan has 29 tokens"),
    (lambda p: {"pick_weights": p.weights[:, :2]}, r"pick_weights is \[29, 2\]"),
    (lambda p: {"down": p.down[:, :, :5]}, r"gate_up \[6, 48, 32\] and down \[6, 32, 5\] do not"),
    (lambda p: {"gate_up_bias": p.down[:, 0]}, r"gate_up_bias is \[6, 24\], but must be \[6, 48\]"),
    (lambda p: {"x": p.x.half()}, "x is torch.float16, but must be float32 or bfloat16"),
    (lambda p: {"x": p.x.bfloat16()}, "gate_up is torch.float32, but must be torch.bfloat16"),
    (lambda p: {"down": p.down.bfloat16()}, "down is torch.bfloat16, but must be torch.float32"),
    (lambda p: {"gate_up": p.gate_up.repeat(70, 1, 1)},
     "gate_up has 420 experts, but the plan has 6"),
    (lambda p: {"constants": (1.0,)}, "constants are .* limit, alpha and offset"),
])
def test_what_does_not_fit_is_named(device, change, words):
    problem = Problem(device)
    arguments = {"x": problem.x, "pick_weights": problem.weights, "gate_up": problem.gate_up,
                 "down": problem.down} | change(problem)
    with pytest.raises(switchyard.Error, match=words):
        st.moe(st.plan(problem.ids, E), **arguments)


@pytest.mark.parametrize("call, words", [
    (lambda p, plan: st.dispatch(st.Plan(plan.tensor[:8].clone(), T, K, E), p.x),
     r"the plan's tensor is \[8\]"),
    (lambda p, plan: st.dispatch(st.Plan(plan.tensor.long(), T, K, E), p.x), "int64, but must be"),
    (lambda p, plan: st.dispatch(st.Plan(plan.tensor, T, K, E, alignment=0), p.x), "alignment"),
    (lambda p, plan: st.combine(plan, st.dispatch(plan, p.x), p.weights[:1, :1]), "pick_weights"),
    (lambda p, plan: st.combine(plan, st.dispatch(plan, p.x)[:5], p.weights), "rows are"),
    (lambda p, plan: st.experts(plan, st.dispatch(plan, p.x)[:5], p.gate_up, p.down), "rows are"),
    (lambda p, plan: st.route(p.x, p.gate_up[0, :, :4], K),
     r"gate is \[48, 4\], but must be \[E,32\] for x \[29, 32\]"),
    (lambda p, plan: st.route(p.x, p.gate_up[0], K, gate_bias=p.x[0, :1]), "gate_bias is"),
    (lambda p, plan: st.route(p.x, p.gate_up[0], K, score_bias=p.x[0, :1]), "score_bias is"),
    (lambda p, plan: torch.ops.switchyard.plan(p.ids.short(), E, 1, False), "int16"),
])
def test_what_would_corrupt_memory_is_an_error(device, call, words):
    problem = Problem(device)
    with pytest.raises(switchyard.Error, match=words):
        call(problem, st.plan(problem.ids, E))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tensors_of_two_devices_are_an_error():
    problem, other = Problem("cuda"), Problem("cpu")
    plan = st.plan(problem.ids, E)
    for arguments in ((other.x, problem.weights, problem.gate_up, problem.down),
                      (problem.x, other.weights, problem.gate_up, problem.down),
                      (problem.x, problem.weights, problem.gate_up, other.down)):
        with pytest.raises(switchyard.InvalidArgument, match="is on"):
            st.moe(plan, *arguments)


def test_ids_of_a_wrong_form_are_named():
    with pytest.raises(switchyard.InvalidArgument, match="must be int32 or int64"):
        st.plan(torch.zeros(3, 2), E)


# Other activations against torch's own functions.

@pytest.mark.parametrize("activation, constants", [
    (activation, constants) for activation in Activation for constants in
    ((0.5, 1.702, 1.0), (0.4, 1.0, 0.0))])
def test_activations(device, activation, constants):
    from switchyard.torch._hugging_face import _ours
    problem = Problem(device)
    if not activation.has_gate:
        problem.gate_up = problem.gate_up.detach()[:, :I].contiguous().requires_grad_()

    def reference(p):
        plan = st.plan(p.ids, E)
        rows = st.dispatch(plan, p.x)[:plan.num_rows()]
        out = torch.zeros_like(rows)
        for e in range(E):
            first = plan.row_offsets[e].item()
            last = first + plan.group_rows[e].item()
            inner = rows[first:last] @ p.gate_up[e].mT
            gate, up = inner.chunk(2, -1) if activation.has_gate else (inner, inner)
            out[first:last] = _ours(activation, constants, gate, up) @ p.down[e].mT
        return st.combine(plan, out, p.weights)

    actual = problem.run(lambda p: st.moe(st.plan(p.ids, E), p.x, p.weights, p.gate_up, p.down,
                                          activation=activation, constants=constants))
    assert_near(actual, problem.run(reference), 1e-5)


# The router.

def torch_router(x, gate, top_k, sigmoid, normalise, scale, bias):
    logits = F.linear(x.float(), gate.float())
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ids = (scores if bias is None else scores + bias).topk(top_k).indices
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_router(device, score, normalise, biased):
    problem = Problem(device)
    gate = torch.randn(E, H, generator=torch.Generator().manual_seed(3)).to(device)
    gate.requires_grad_()
    bias = torch.linspace(-0.2, 0.2, E, device=device) if biased else None
    ids, weights, non_finite = st.route(problem.x, gate, K, score=score, score_bias=bias,
                                        normalise=normalise, scale=2.5)
    expected_ids, expected = torch_router(problem.x, gate, K, score == "sigmoid", normalise, 2.5,
                                          bias)
    assert torch.equal(ids.long(), expected_ids)
    assert non_finite.item() == -1
    d_weights = torch.randn_like(weights)
    inputs = (problem.x, gate)
    assert_near([weights, *torch.autograd.grad(weights, inputs, d_weights)],
                [expected, *torch.autograd.grad(expected, inputs, d_weights)], 1e-5)


def test_logits_that_are_not_finite_are_told(device):
    problem = Problem(device)
    x = problem.x.detach().clone()
    x[4, 2] = float("nan")
    ids, weights, non_finite = st.route(x, torch.ones(E, H, device=device), K)
    assert non_finite.item() == 4
    assert torch.all(ids[4] == -1) and torch.all(weights[4] == 0)


# Torch around the operators: opcheck, compile, checkpointing, graphs, streams.

def test_opcheck(device):
    p = Problem(device, biases=True)
    p.ids[3, 1] = next(e for e in range(E) if e not in p.ids[3])  # so that every row is used
    detached = [t.detach() for t in p.experts()]
    form = (int(Activation.SWIGLU), list(st.DEFAULT_CONSTANTS))
    tensor = st.plan(p.ids, E).tensor
    x, weights = p.x.detach(), p.weights.detach()
    ops = torch.ops.switchyard
    y, inner = ops.moe_forward(x, weights, tensor, 1, *detached, *form, T * K, True)
    rows = ops.dispatch(x, tensor, K, E, 1, T * K)
    _, rows_inner = ops.experts_forward(rows, tensor, T, K, 1, *detached, *form, True)
    router = (x, torch.randn(E, H, device=device), None, None, K, False, 0, True, 1.0, 1, 1)
    ids, d_weights, _ = ops.route(*router)
    for op, arguments in [
        (ops.plan, (p.ids, E, 1, False)),
        (ops.row_sources, (tensor, K, E, 1, T)),
        (ops.dispatch, (x, tensor, K, E, 1, T * K)),
        (ops.combine, (rows, weights, tensor, K, E, 1, T)),
        (ops.combine_backward, (y, weights, rows, tensor, K, E, 1)),
        (ops.moe_forward, (x, weights, tensor, 1, *detached, *form, T * K, True)),
        (ops.moe_backward, (y, x, weights, tensor, 1, *detached, *form, inner, False)),
        (ops.experts_forward, (rows, tensor, T, K, 1, *detached, *form, True)),
        (ops.experts_backward,
         (rows, rows, tensor, T, K, 1, *detached, *form, rows_inner, False)),
        (ops.route, router),
        (ops.route_backward, (d_weights, ids, *router)),
    ]:
        # The words between the tables of a plan differ from call to call.
        values = () if op == ops.plan else (
            "test_aot_dispatch_dynamic" if op == ops.row_sources else "test_aot_dispatch_static",)
        torch.library.opcheck(op.default, arguments,
                              test_utils=("test_schema", "test_faketensor", *values))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("form", [with_moe, with_parts])
def test_compile(device, form, exact):
    problem = Problem(device)
    expected = problem.run(form, exact=exact)
    compiled = torch.compile(functools.partial(form, exact=exact), fullgraph=True,
                             backend="aot_eager")
    assert_near(problem.run(compiled), expected, 1e-7)


def test_compile_with_inductor(device):
    problem = Problem(device)
    expected = problem.run(with_moe)
    compiled = torch.compile(with_moe, fullgraph=True)
    assert_near(problem.run(compiled), expected, 1e-7)


def test_compile_for_any_number_of_tokens(device):
    def layer(x, ids, weights, gate_up, down):
        return st.moe(st.plan(ids, E), x, weights, gate_up, down)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (8, 13, 29):
        p = Problem(device, num_tokens=num_tokens)
        arguments = (p.x, p.ids, p.weights, p.gate_up, p.down)
        assert torch.equal(compiled(*arguments), layer(*arguments))


def test_checkpointing(device):
    problem = Problem(device)
    expected = problem.run(with_moe)
    actual = problem.run(lambda p: checkpoint(with_moe, p, use_reentrant=False))
    assert all(map(torch.equal, actual, expected))


def test_selective_checkpointing(device):
    """The experts are kept, and all else is computed again."""
    problem = Problem(device)
    expected = problem.run(with_moe)
    seen = []

    def policy(_context, op, *_arguments, **_options):
        seen.append(op)
        is_kept = op == torch.ops.switchyard.moe_forward.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    actual = problem.run(
        lambda p: checkpoint(with_moe, p, use_reentrant=False, context_fn=contexts))
    assert all(map(torch.equal, actual, expected))
    assert torch.ops.switchyard.moe_forward.default in seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph_replays_with_other_tokens(dtype):
    static, other = Problem("cuda", dtype), Problem("cuda", dtype)
    with torch.no_grad():
        other.x.mul_(0.5)
        other.ids.copy_(other.ids.flip(0))
    expected = other.run(with_moe)
    static.run(with_moe)
    torch.cuda.synchronize()
    for leaf in static.leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    syncs = st.host_syncs("cuda")
    with torch.cuda.graph(graph):
        captured = static.run(with_moe)
    with torch.no_grad():
        static.x.copy_(other.x)
        static.ids.copy_(other.ids)
    graph.replay()
    torch.cuda.synchronize()
    assert st.host_syncs("cuda") == syncs
    assert all(map(torch.equal, captured, expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_is_torchs():
    problem = Problem("cuda", torch.bfloat16)
    problem.run(with_moe)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        with_moe(problem)
    rows = 2 * T * K * (H + I)  # out of the experts, and between their products
    assert torch.cuda.max_memory_allocated() >= before + rows
    for _ in range(3):
        problem.run(with_moe)
        problem.run(lambda p: with_moe(p, alignment=16))
    torch.cuda.synchronize()
    for leaf in problem.leaves:
        leaf.grad = None
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_compile_into_cuda_graphs():
    """torch.compile's own graphs share a pool of memory that nobody else may keep some of."""
    problem = Problem("cuda", torch.bfloat16)
    expected = problem.run(with_moe)
    compiled = torch.compile(with_moe, mode="reduce-overhead")
    for _ in range(4):
        actual = [t.clone() for t in problem.run(compiled)]
    assert_near(actual, expected, 1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_streams():
    """Work on two streams at once gives what it gives alone."""
    problems = [Problem("cuda", torch.bfloat16) for _ in range(2)]
    expected = problems[0].run(with_moe)
    streams = [torch.cuda.Stream() for _ in problems]
    results = []
    for _ in range(5):
        for problem, stream in zip(problems, streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(problem.run(with_moe))
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected))


# Processes.

def run_python(program):
    """The exit code and output of another Python."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True,
                            text=True, timeout=120, check=False)
    return result.returncode, result.stdout + result.stderr


def test_a_forked_child_computes():
    program = """
import os, torch, switchyard, switchyard.torch as st, numpy as np
torch.set_num_threads(2)
ids = torch.tensor([[0, 1], [1, 0]])
st.plan(ids, 2)
switchyard.plan(ids.numpy(), 2)
child = os.fork()
if child == 0:
    plan = st.plan(ids, 2)
    st.moe(plan, torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 6, 4), torch.ones(2, 4, 3))
    switchyard.plan(ids.numpy(), 2)
    os._exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(program) == (0, "child 7\n")


def test_exported_memory_may_outlive_the_package():
    program = """
import torch, switchyard
class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.from_dlpack(switchyard.bfloat16([1.0, 2.0])))
        self.me = [self]
holder = Holder()
torch.kept = torch.from_dlpack(switchyard.bfloat16([3.0]))
print(holder.values.tolist())
"""
    assert run_python(program) == (0, "[1.0, 2.0]\n")
