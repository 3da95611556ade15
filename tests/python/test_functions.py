# SPDX-License-Identifier: Apache-2.0
"""One rank's functions beside loops of numpy."""
import numpy as np
import pytest

import switchyard as sy

T, H, I, E, K = 11, 16, 12, 5, 3


def silu(values):
    return values / (1 + np.exp(-values))


class Problem:
    def __init__(self, seed=0, dtype=np.float32):
        rng = np.random.default_rng(seed)

        def draw(*shape):
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)

        self.x, self.d_y = draw(T, H), draw(T, H)
        self.gate, self.gate_up, self.down = draw(E, H), draw(E, 2 * I, H), draw(E, H, I)
        self.gate_up_bias, self.down_bias = draw(E, 2 * I), draw(E, H)
        self.ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
        self.ids[2] = -1
        self.weights = np.abs(draw(T, K))

    @property
    def experts(self):
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    def expert(self, e, token):
        inner = self.gate_up[e].astype(np.float64) @ token + self.gate_up_bias[e]
        return self.down[e] @ (silu(inner[:I]) * inner[I:]) + self.down_bias[e]

    def y(self):
        y = np.zeros((T, H))
        for t in range(T):
            for k in range(K):
                if self.ids[t, k] >= 0:
                    y[t] += self.weights[t, k] * self.expert(self.ids[t, k], self.x[t])
        return y


def close(ours, reference, tolerance=1e-5):
    assert ours.shape == reference.shape
    error = np.linalg.norm(ours - reference)
    assert error <= tolerance * max(np.linalg.norm(reference), 1e-30)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_a_plan_puts_picks_by_expert(alignment, id_dtype):
    p = Problem()
    plan = sy.plan(p.ids.astype(id_dtype), E, alignment=alignment)
    rows = {}
    offset = 0
    for e in range(E):
        assert plan.row_offsets[e] == offset
        picks = [t * K + k for t in range(T) for k in range(K) if p.ids[t, k] == e]
        assert plan.group_rows[e] == len(picks)
        rows.update({pick: offset + i for i, pick in enumerate(picks)})
        offset += -(-len(picks) // alignment) * alignment
    assert plan.num_rows() == offset <= plan.most_rows
    slots = [[rows.get(t * K + k, -1) for k in range(K)] for t in range(T)]
    assert np.array_equal(plan.slots, slots)
    assert all(plan.row_sources[row] == pick for pick, row in rows.items())


@pytest.mark.parametrize("exact", [False, True])
def test_moe_is_a_loop_over_tokens_and_picks(exact):
    p = Problem()
    plan = sy.plan(p.ids, E, alignment=4)
    y = sy.moe(plan, p.x, p.weights, *p.experts, exact=exact)
    assert isinstance(y, np.ndarray)
    close(y, p.y())
    rows = sy.dispatch(plan, p.x, exact=exact)
    out = sy.experts(plan, rows, *p.experts)
    assert np.array_equal(sy.combine(plan, out, p.weights), y)


def test_bf16_gives_an_array_and_the_threads_do_not_matter():
    p = Problem()
    halves = [sy.bfloat16(array) for array in p.experts]
    ys = []
    for threads in (1, 3):
        plan = sy.plan(p.ids, E, device=sy.Device("cpu", threads=threads))
        ys.append(sy.moe(plan, sy.bfloat16(p.x), p.weights, *halves))
    assert isinstance(ys[0], sy.Array) and ys[0].dtype == "bfloat16"
    assert np.array_equal(ys[0].float32(), ys[1].float32())
    close(ys[0].float32(), p.y(), 2e-2)


def difference(function, array, direction, step=1e-2):
    before = array.copy()
    array[...] = before + step * direction
    up = function()
    array[...] = before - step * direction
    down = function()
    array[...] = before
    return (up - down) / (2 * step)


def test_moe_backward_is_a_difference_quotient():
    p = Problem(3)
    plan = sy.plan(p.ids, E)
    grads = sy.moe_backward(plan, p.d_y, p.x, p.weights, *p.experts)
    named = [(p.x, grads.d_x), (p.weights, grads.d_pick_weights), *zip(p.experts, grads.experts)]
    rng = np.random.default_rng(1)
    for array, gradient in named:
        direction = rng.standard_normal(array.shape).astype(np.float32)
        wanted = difference(lambda: float(np.sum(p.y() * p.d_y)), array, direction)
        assert abs(np.sum(gradient * direction) - wanted) < 2e-3 * max(1, abs(wanted))
    frozen = sy.moe_backward(plan, p.d_y, p.x, p.weights, *p.experts, frozen=True)
    assert frozen.experts == (None, None, None, None)
    assert np.array_equal(frozen.d_x, grads.d_x)


def test_backward_in_parts_is_that_of_the_whole():
    p = Problem(4)
    plan = sy.plan(p.ids, E)
    rows = sy.dispatch(plan, p.x)
    before = rows.copy()
    out = sy.experts(plan, rows, *p.experts)
    d_out, d_weights = sy.combine_backward(plan, p.d_y, out, p.weights)
    d_rows, gradients = sy.experts_backward(plan, d_out, rows, *p.experts)
    whole = sy.moe_backward(plan, p.d_y, p.x, p.weights, *p.experts)
    used = plan.num_rows()
    assert np.array_equal(rows[:used], before[:used])  # it was not used up
    close(sy.combine(plan, d_rows), whole.d_x)
    close(d_weights, whole.d_pick_weights)
    for part, of_whole in zip(gradients, whole.experts):
        close(part, of_whole)


def softmax_routing(p, normalise, ids=None):
    logits = p.x.astype(np.float64) @ p.gate.T
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    if ids is None:
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    weights = np.take_along_axis(scores, ids, 1)
    return ids, weights / weights.sum(1, keepdims=True) if normalise else weights


@pytest.mark.parametrize("normalise", [False, True])
def test_route_and_its_backward(normalise):
    p = Problem(5)
    form = sy.RouterForm(E, K, normalise=normalise)
    ids, weights, non_finite = sy.route(p.x, p.gate, form)
    expected_ids, expected = softmax_routing(p, normalise)
    assert np.array_equal(ids, expected_ids) and non_finite[0] == -1
    close(weights, expected)
    d_weights = np.random.default_rng(2).standard_normal((T, K)).astype(np.float32)
    grads = sy.route_backward(d_weights, ids, p.x, p.gate, form)
    for array, gradient in ((p.x, grads.d_x), (p.gate, grads.d_gate)):
        direction = np.random.default_rng(6).standard_normal(array.shape).astype(np.float32)
        wanted = difference(
            lambda: float(np.sum(softmax_routing(p, normalise, ids)[1] * d_weights)), array,
            direction, 1e-3)
        assert abs(np.sum(gradient * direction) - wanted) < 2e-3 * max(1, abs(wanted))


def test_a_token_that_is_not_finite_has_no_picks():
    p = Problem()
    p.x[4, 0] = np.inf
    ids, weights, non_finite = sy.route(p.x, p.gate, sy.RouterForm(E, K))
    assert non_finite[0] == 4 and (ids[4] == -1).all() and (weights[4] == 0).all()


def test_a_score_bias_enters_the_choice_alone():
    p = Problem()
    bias = np.zeros(E, np.float32)
    bias[3] = 100
    form = sy.RouterForm(E, 1, "sigmoid", "choice", normalise=False)
    ids, weights, _ = sy.route(p.x, p.gate, form, score_bias=bias)
    assert (ids == 3).all()
    close(weights[:, 0], 1 / (1 + np.exp(-(p.x.astype(np.float64) @ p.gate[3]))))


def test_presets():
    form = sy.RouterForm.preset("deepseek_v3", 16, 4)
    assert (form.score, form.bias_enters, form.scale) == ("sigmoid", "choice", 2.5)
    assert (form.num_expert_groups, form.kept_expert_groups) == (8, 4)
    assert not sy.RouterForm.preset("olmoe", 16, 4).normalise
    with pytest.raises(sy.InvalidArgument, match='there is no router "gpt"; there are: deepseek_v3, kempner'):
        sy.RouterForm.preset("gpt", 8, 2)


def test_misuse_is_told():
    p = Problem()
    plan = sy.plan(p.ids, E)
    calls = {
        r"x is float32 \[3, 16\], but must be .* \[11,H\]":
            lambda: sy.moe(plan, p.x[:3], p.weights, *p.experts),
        r"pick_weights is float32 \[11, 2\], but must be float32 \[11,3\]":
            lambda: sy.moe(plan, p.x, p.weights[:, :2], *p.experts),
        r"gate_up is float32 \[5, 7, 16\], but must be float32 \[5,24,16\]":
            lambda: sy.moe(plan, p.x, p.weights, p.gate_up[:, :7], p.down),
        r"have 2 experts, but the plan has 5":
            lambda: sy.moe(plan, p.x, p.weights, p.gate_up[:2], p.down[:2]),
        r"go together":
            lambda: sy.moe(plan, p.x, p.weights, p.gate_up, p.down, p.gate_up_bias),
        r"down is bfloat16": lambda: sy.moe(plan, p.x, p.weights, p.gate_up, sy.bfloat16(p.down)),
        r"expert_ids is float32": lambda: sy.plan(p.x, E),
        r"is 4, which is neither -1 nor an expert of 4": lambda: sy.plan(np.int32([[4]]), 4),
        r"alignment": lambda: sy.plan(p.ids, E, alignment=0),
        r"rows": lambda: sy.combine(plan, p.x[:2], p.weights),
        r"rows is f32 \[2,16\], but must be f32 \[30,16\] or more":
            lambda: sy.experts(plan, p.x[:2], *p.experts),
        r"gate is float32 \[4, 16\], but must be .* \[5,16\]":
            lambda: sy.route(p.x, p.gate[:4], sy.RouterForm(E, K)),
        r"top_k": lambda: sy.route(p.x, p.gate, sy.RouterForm(E, E + 1)),
        r"a score_bias was not given":
            lambda: sy.route(p.x, p.gate, sy.RouterForm(E, K, bias_enters="choice")),
        r"score is 'tanh'": lambda: sy.RouterForm(E, K, "tanh"),
    }
    for message, call in calls.items():
        with pytest.raises(sy.InvalidArgument, match=message):
            call()
    assert sy.plan(np.int32([[4]]), 4, sentinels=True).num_rows() == 0
