# SPDX-License-Identifier: Apache-2.0
"""The layer beside loops of numpy, over 1 to 4 ranks, and beside recorded cases."""
import pathlib

import numpy as np
import pytest

import switchyard as sy

H, I, S, E, K, T = 8, 6, 10, 6, 2, 23
GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
ROUTER = sy.RouterForm(E, K)


def draw(rng, *shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


class Problem:
    def __init__(self, seed=0, shared=True, biases=True):
        rng = np.random.default_rng(seed)
        self.x, self.d_y = draw(rng, T, H), draw(rng, T, H)
        self.weights = sy.MoeWeights(gate=draw(rng, E, H), gate_up=draw(rng, E, 2 * I, H),
                                     down=draw(rng, E, H, I))
        if shared:
            self.weights.shared_gate_up = draw(rng, 2 * S, H)
            self.weights.shared_down = draw(rng, H, S)
        if biases:
            self.weights.gate_bias = draw(rng, E)
            self.weights.gate_up_bias, self.weights.down_bias = draw(rng, E, 2 * I), draw(rng, E, H)
        self.options = dict(hidden=H, intermediate=I, router=ROUTER,
                            shared_intermediate=S if shared else 0)

    def part(self, experts):
        part = sy.MoeWeights(**vars(self.weights))
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            whole = getattr(self.weights, name)
            setattr(part, name, None if whole is None else whole[experts])
        return part

    def y(self, ids):
        """A loop in f64, with this choice."""
        w, x = self.weights, self.x.astype(np.float64)
        scores = np.exp(x @ w.gate.T + w.gate_bias)
        y = np.zeros((T, H))
        for t in range(T):
            chosen = scores[t, ids[t]] / scores[t, ids[t]].sum()
            for e, weight in zip(ids[t], chosen):
                y[t] += weight * (w.down[e] @ swiglu(w.gate_up[e] @ x[t] + w.gate_up_bias[e]) +
                                  w.down_bias[e])
            y[t] += w.shared_down @ swiglu(w.shared_gate_up @ x[t])
        return y


def swiglu(inner):
    gate, up = np.split(inner, 2)
    return gate / (1 + np.exp(-gate)) * up


def cuts(num_ranks):
    return {1: [0, T], 2: [0, 17, T], 4: [0, 5, 5, 20, T]}[num_ranks]  # rank 1 of 4 has none


def step(problem, num_ranks, placement=None, **options):
    """y, d_x, d_expert_weights, and the gradients, of all ranks together."""
    def rank(comm):
        layer = sy.MoeLayer(comm, placement=placement, **{**problem.options, **options})
        weights = problem.part(layer.placement.experts_of(comm.rank))
        tokens = slice(*cuts(num_ranks)[comm.rank:comm.rank + 2])
        y, saved = layer.forward_training(weights, problem.x[tokens])
        assert np.array_equal(layer.forward(weights, problem.x[tokens]), y)
        grads = layer.backward(weights, saved, problem.d_y[tokens])
        return layer.placement.experts_of(comm.rank), y, grads, comm.all_reduce(grads.weights.gate)

    parts = sy.run_ranks(num_ranks, rank)
    tokens = [np.concatenate(list(some)) for some in zip(*(
        (y, grads.d_x, grads.d_expert_weights) for _, y, grads, _ in parts))]
    order = np.argsort(np.concatenate([experts for experts, *_ in parts]).astype(int))
    names = [n for n in ("gate_up", "down", "gate_up_bias", "down_bias")
             if getattr(problem.weights, n) is not None]
    experts = [np.concatenate([getattr(grads.weights, name) for _, _, grads, _ in parts])[order]
               for name in names]
    return tokens + experts, parts[0][3]


@pytest.mark.parametrize("keep", ["rows", "activations", "nothing"])
def test_ranks_have_the_bits_of_one(keep):
    problem = Problem()
    one, gate = step(problem, 1)
    uneven = sy.ExpertPlacement([2, 0, 2, 2, 0, 2], 4)  # two ranks own nothing
    for num_ranks, placement in ((1, None), (2, None), (4, None), (4, uneven)):
        many, their_gate = step(problem, num_ranks, placement, keep=keep)
        assert all(np.array_equal(a, b) for a, b in zip(one, many)), (num_ranks, placement)
        assert np.allclose(gate, their_gate, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [
    dict(alignment=8), dict(mover="packed"), dict(sizing=sy.Sizing.bounded(T * K)),
    dict(device=sy.Device("cpu", threads=3)), dict(weight_stage="activation")])
def test_options_that_do_not_change_the_function(options):
    problem = Problem(1)
    for ours, plain in zip(step(problem, 2, **options)[0], step(problem, 1)[0]):
        assert np.allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_the_layer_is_a_loop_over_tokens_and_picks():
    problem = Problem(2)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    y, saved = layer.forward_training(problem.weights, problem.x)
    ids, weights = saved.routing()
    logits = problem.x @ problem.weights.gate.T + problem.weights.gate_bias
    assert np.array_equal(ids, np.argsort(-logits, axis=1)[:, :K])
    assert np.allclose(weights.sum(1), 1, atol=1e-6)
    assert np.allclose(y, problem.y(ids), atol=1e-5)


def test_backward_is_a_difference_quotient():
    problem = Problem(3)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    _, saved = layer.forward_training(problem.weights, problem.x)
    ids, _ = saved.routing()
    grads = layer.backward(problem.weights, saved, problem.d_y)
    rng = np.random.default_rng(0)
    pairs = [(problem.x, grads.d_x)] + [
        (array, getattr(grads.weights, name)) for name, array in vars(problem.weights).items()
        if array is not None]
    for array, gradient in pairs:
        direction = rng.standard_normal(array.shape).astype(np.float32)
        before, sums = array.copy(), []
        for sign in (1, -1):
            array[...] = before + sign * 1e-2 * direction
            sums.append(np.sum(problem.y(ids) * problem.d_y))
        array[...] = before
        wanted = (sums[0] - sums[1]) / 2e-2
        assert abs(np.sum(gradient * direction) - wanted) < 3e-3 * max(1, abs(wanted))


def test_gradients_are_written_or_added_where_the_caller_says():
    problem = Problem(4)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    into = layer.zeros(biases=True)

    def run(**options):
        _, saved = layer.forward_training(problem.weights, problem.x)
        return layer.backward(problem.weights, saved, problem.d_y, **options)

    plain = run().weights
    assert run(into=into).weights is into
    assert np.array_equal(into.gate_up, plain.gate_up)
    run(into=into, accumulate=True)
    assert np.allclose(into.down, 2 * plain.down, rtol=1e-5)
    with pytest.raises(sy.InvalidArgument, match="no `into` to add to"):
        run(accumulate=True)


def test_bf16_layers_keep_f32_gradients_if_asked():
    problem = Problem(5, biases=False)
    weights = sy.MoeWeights(**{name: None if array is None else sy.bfloat16(array)
                               for name, array in vars(problem.weights).items()})
    layer = sy.MoeLayer(sy.connect(), dtype="bfloat16", **problem.options)
    exact = sy.MoeLayer(sy.connect(), **problem.options)
    y, saved = layer.forward_training(weights, sy.bfloat16(problem.x))
    assert np.allclose(y.float32(), exact.forward(problem.weights, problem.x), atol=0.05)
    into = sy.MoeLayer(sy.connect(), **problem.options).zeros()
    layer.backward(weights, saved, sy.bfloat16(problem.d_y), into=into)
    assert into.gate_up.dtype == np.float32 and np.abs(into.gate_up).max() > 0


def test_given_picks_padding_and_weights():
    problem = Problem(6)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    ids = np.stack([np.random.default_rng(t).permutation(E)[:K] for t in range(T)])
    y = layer.forward(problem.weights, problem.x, expert_ids=ids)
    assert np.allclose(y, problem.y(ids), atol=1e-5)
    valid = np.ones(T, np.int32)
    valid[3] = 0
    padded = layer.forward(problem.weights, problem.x, expert_ids=ids, valid=valid)
    assert (padded[3] == 0).all() and np.array_equal(padded[4:], y[4:])
    plain = Problem(6, shared=False)
    without = sy.MoeLayer(sy.connect(), **plain.options)
    weights = np.full((T, K), 0.5, np.float32)
    plain.weights.gate = None
    plain.weights.gate_bias = None
    ours = without.forward(plain.weights, plain.x, expert_ids=ids, expert_weights=weights)
    w = plain.weights
    wanted = sum(0.5 * (w.down[e] @ swiglu(w.gate_up[e] @ plain.x[0] + w.gate_up_bias[e]) +
                        w.down_bias[e]) for e in ids[0])
    assert np.allclose(ours[0], wanted, atol=1e-5)


def test_statistics_and_losses():
    problem = Problem(7)
    layer = sy.MoeLayer(sy.connect(), balance_loss=True, z_loss=True, **problem.options)
    _, saved = layer.forward_training(problem.weights, problem.x)
    ids, _ = saved.routing()
    counts = np.bincount(ids.ravel(), minlength=E)
    logits = problem.x.astype(np.float64) @ problem.weights.gate.T + problem.weights.gate_bias
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = saved.losses()
    assert np.isclose(losses["balance"], E * (counts / (T * K)) @ scores.mean(0), rtol=1e-5)
    assert np.isclose(losses["z"], np.mean(np.log(np.exp(logits).sum(1)) ** 2), rtol=1e-5)
    assert saved.nbytes > problem.x.nbytes
    plain = layer.backward(problem.weights, saved, problem.d_y)
    _, saved = layer.forward_training(problem.weights, problem.x)
    weighed = layer.backward(problem.weights, saved, problem.d_y, d_balance_loss=1.0, d_z_loss=0.5)
    assert not np.allclose(plain.weights.gate, weighed.weights.gate)
    assert np.array_equal(plain.weights.down, weighed.weights.down)
    stats = layer.stats()
    assert stats["rows_by_expert"] == counts.tolist() and stats["rows_by_rank"] == [T * K]
    assert {name for name, _ in stats["forward"]} and not stats["overflow"]
    assert layer.pick_counts().picks.tolist() == (2 * counts).tolist()
    taken = layer.take_pick_counts()
    assert taken.num_tokens == 2 * T and layer.pick_counts().num_tokens == 0


def test_a_step_that_overflows_runs_again():
    problem = Problem(8, shared=False, biases=False)
    problem.weights.gate[0] = 100 * np.abs(problem.weights.gate[0])
    exact, _ = step(problem, 2)

    def rank(comm):
        layer = sy.MoeLayer(comm, sizing=sy.Sizing.bounded(4), **problem.options)
        weights = problem.part(layer.placement.experts_of(comm.rank))
        tokens = slice(*cuts(2)[comm.rank:comm.rank + 2])
        results = {}

        def run():
            results["y"], saved = layer.forward_training(weights, problem.x[tokens])
            results["status"] = layer.plan_status()
            layer.backward(weights, saved, problem.d_y[tokens])

        run()
        assert results["status"]["overflow"] and max(results["status"]["needed_rows"]) > 4
        with pytest.raises(sy.InvalidArgument, match="4"):
            layer.check()
        layer.take_pick_counts()
        assert sy.run_step([layer], run)
        assert layer.row_capacity > 4
        assert not sy.run_step([layer, layer], run)
        return results["y"]

    assert np.array_equal(np.concatenate(sy.run_ranks(2, rank)), exact[0])


def test_errors_of_a_step_come_out_of_it():
    layer = sy.MoeLayer(sy.connect(), **Problem().options)

    def fail():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        sy.run_step([layer], fail)
    with pytest.raises(sy.InvalidArgument, match="x"):
        sy.run_step([layer], lambda: layer.forward(Problem().weights, np.zeros((2, 3), np.float32)))

    def rank(comm):
        def run():
            if comm.rank == 1:
                fail()
            comm.barrier()
        sy.run_step([sy.MoeLayer(comm, **Problem().options)], run)

    with pytest.raises(ZeroDivisionError, match="mine"):
        sy.run_ranks(3, rank)


def test_an_error_of_one_rank_reaches_the_others():
    problem = Problem(9)
    told = {}

    def rank(comm):
        layer = sy.MoeLayer(comm, **problem.options)
        weights = problem.part(layer.placement.experts_of(comm.rank))
        x = problem.x if comm.rank != 1 else problem.x.astype(np.float64)
        try:
            layer.forward(weights, x)
        except sy.CommunicationError as error:
            told[comm.rank] = str(error)
            raise

    with pytest.raises(sy.InvalidArgument, match="x is float64"):
        sy.run_ranks(3, rank)
    assert set(told) == {0, 2} and all("x is float64" in reason for reason in told.values())


def test_bad_ids_are_the_same_error_on_every_rank():
    problem = Problem(10)
    messages = []

    def rank(comm):
        layer = sy.MoeLayer(comm, **problem.options)
        ids = np.tile(np.int32([0, 1]), (T, 1))
        ids[5, 1] = E if comm.rank == 1 else 1
        with pytest.raises(sy.InvalidArgument) as caught:
            layer.forward(problem.part(layer.placement.experts_of(comm.rank)), problem.x,
                          expert_ids=ids)
        messages.append(str(caught.value))
        comm.barrier()  # it can still be used

    sy.run_ranks(3, rank)
    assert len(set(messages)) == 1 and "expert_ids[5,1] is 6" in messages[0]


def test_misuse_is_told():
    problem = Problem(11)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    other = sy.MoeLayer(sy.connect(), **problem.options)
    weights, x = problem.weights, problem.x
    _, saved = layer.forward_training(weights, x)
    calls = {
        r"x is f32 \[23,4\]": lambda: layer.forward(weights, x[:, :4]),
        "x is a list": lambda: layer.forward(weights, [1.0]),
        "x is None": lambda: layer.forward(weights, None),
        "weights for 2 experts were given, but rank 0 owns 6":
            lambda: layer.forward(problem.part([0, 1]), x),
        "gate": lambda: layer.forward(sy.MoeWeights(gate_up=weights.gate_up, down=weights.down), x),
        r"gate \[10,8\] is missing": lambda: layer.forward(  # of the shared expert
            sy.MoeWeights(weights.gate, weights.gate_up, weights.down), x),
        "do not belong together": lambda: layer.forward(
            sy.MoeWeights(weights.gate, weights.gate_up[:, 1:], weights.down), x),
        "filled by another layer": lambda: other.backward(weights, saved, problem.d_y),
        r"d_y is f32 \[3,8\]": lambda: layer.backward(weights, saved, problem.d_y[:3]),
        r"gate_up is read-only|gate_up \[6, 12, 8\] is read-only":
            lambda: layer.backward(weights, saved, problem.d_y, into=read_only(layer.zeros())),
        r"needs num_experts \(None\)": lambda: sy.MoeLayer(sy.connect(), hidden=4, intermediate=4),
        "keep is 'all'": lambda: sy.MoeLayer(sy.connect(), keep="all", **problem.options),
        "dtype is 'float16'": lambda: sy.MoeLayer(sy.connect(), dtype="float16", **problem.options),
        r"hidden \(0\)": lambda: sy.MoeLayer(sy.connect(), hidden=0, intermediate=4, router=ROUTER),
        "alignment": lambda: sy.MoeLayer(sy.connect(), alignment=0, **problem.options),
        r"row_capacity \(0\)": lambda: sy.Sizing.bounded(0),
        "experts|ranks": lambda: sy.MoeLayer(
            sy.connect(), placement=sy.ExpertPlacement.contiguous(E, 2), **problem.options),
    }
    for message, call in calls.items():
        with pytest.raises(sy.InvalidArgument, match=message):
            call()


def test_what_is_used_up_or_closed_is_told():
    problem = Problem(12)
    layer = sy.MoeLayer(sy.connect(), **problem.options)
    other = sy.MoeLayer(sy.connect(), **problem.options)
    weights, x = problem.weights, problem.x
    _, saved = layer.forward_training(weights, x)
    layer.backward(weights, saved, problem.d_y)
    with pytest.raises(sy.InvalidArgument, match="SavedForBackward is empty"):
        layer.backward(weights, saved, problem.d_y)
    layer.close()
    layer.close()
    for call in (lambda: layer.forward(weights, x), layer.stats, layer.check,
                 lambda: sy.run_step([other, layer], lambda: None)):
        with pytest.raises(sy.InvalidArgument, match="this layer is closed"):
            call()


def read_only(weights):
    weights.gate_up.flags.writeable = False
    return weights


def test_recorded_cases(tmp_path):
    comparisons = sy.verify(GOLDEN)
    assert len({comparison.case for comparison in comparisons}) == 19
    assert [comparison for comparison in comparisons if not comparison.ok] == []
    with pytest.raises(sy.InvalidArgument, match="no recorded cases"):
        sy.verify(tmp_path)


def test_constants_of_an_activation_reach_the_experts():
    problem = Problem(shared=False, biases=False)
    options = dict(activation=sy.Activation.CLAMPED_SWIGLU, constants=(0.2, 1.0, 0.0))
    layer = sy.MoeLayer(sy.connect(), **problem.options, **options)
    y = layer.forward(problem.weights, problem.x)
    routing = sy.route(problem.x, problem.weights.gate, ROUTER)
    expected = sy.moe(sy.plan(routing.expert_ids, E), problem.x, routing.pick_weights,
                      problem.weights.gate_up, problem.weights.down, **options)
    assert np.array_equal(y, expected)
    other = sy.MoeLayer(sy.connect(), **problem.options, activation=options["activation"],
                        constants=(0.2, 1.702, 1.0)).forward(problem.weights, problem.x)
    assert not np.allclose(other, expected)
