# SPDX-License-Identifier: Apache-2.0
"""The layers of torch that bench/gpu_compare.py compares with, on a CPU, and its arguments."""
import itertools
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import gpu_bits  # noqa: E402
import gpu_compare  # noqa: E402
import gpu_layers  # noqa: E402
import gpu_small  # noqa: E402
import gpu_timing  # noqa: E402
from gpu_torch_layers import (BestTorchExperts, GatheredTorchExperts, TorchExperts,  # noqa: E402
                              TorchLayer, clamped_swiglu)

SHAPE = (48, 64, 32, 8, 3)


def make(form, experts=None):
    torch.manual_seed(0)
    weights = gpu_layers.Weights(SHAPE, form, device="cpu")
    batch = gpu_layers.Batch(SHAPE, gpu_layers.route(SHAPE, experts=experts, device="cpu"))
    return weights, batch


def naive(weights, batch):
    """One pick after the other, in f64."""
    y = torch.zeros(batch.x.shape, dtype=torch.float64)
    i = SHAPE[2]
    for t, k in itertools.product(range(SHAPE[0]), range(SHAPE[4])):
        e = batch.ids[t, k]
        inner = weights.gate_up[e].double() @ batch.x[t].double()
        if weights.form.biases:
            inner += weights.gate_up_bias[e].double()
        out = weights.down[e].double() @ weights.form.activation(inner[:i], inner[i:])
        if weights.form.biases:
            out += weights.down_bias[e].double()
        y[t] += batch.weights[t, k].double() * out
    return y


@pytest.mark.parametrize("form", ["swiglu", "gpt-oss"])
@pytest.mark.parametrize("experts", [None, [1, 2, 4, 7]])
def test_all_variants_compute_the_layer(form, experts):
    weights, batch = make(form, experts)
    expected = naive(weights, batch)
    for module in (TorchExperts(weights, 3), BestTorchExperts(weights, 3),
                   GatheredTorchExperts(weights)):
        y = TorchLayer(module, batch).forward()
        assert gpu_layers.distance(y, expected) < 1e-2, module


@pytest.mark.parametrize("form", ["swiglu", "gpt-oss"])
def test_both_trained_variants_have_the_same_gradients(form):
    weights, batch = make(form)
    errors = gpu_layers.check_best(form, batch, TorchExperts(weights, 3),
                                   BestTorchExperts(weights, 3))
    names = {"y", "d_x", "d_weights", "d_gate", "d_up", "d_down"}
    biases = {"d_gate_bias", "d_up_bias", "d_down_bias"}
    assert {name for name in errors if "tile" not in name} == (
        names | biases if form == "gpt-oss" else names)


def test_a_wrong_gradient_of_a_bias_ends_the_run():
    weights, batch = make("gpt-oss")
    best = BestTorchExperts(weights, 3)
    best.down_bias.register_hook(lambda gradient: gradient * 1.1)
    with pytest.raises(SystemExit, match="d_down_bias"):
        gpu_layers.check_best("wrong", batch, TorchExperts(weights, 3), best)


def test_clamped_swiglu_limits_both_sides():
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    sigmoid = torch.sigmoid(1.702 * torch.tensor([7.0, -9.0, 1.0]))
    expected = torch.tensor([7.0, -9.0, 1.0]) * sigmoid * torch.tensor([8.0, -6.0, 1.5])
    torch.testing.assert_close(clamped_swiglu(gate, up), expected)


def test_some_experts_keep_their_biases():
    weights, _ = make("gpt-oss")
    some = weights.of(torch.tensor([5, 2]))
    for name, tensor in some.tensors().items():
        assert torch.equal(tensor, getattr(weights, name)[[5, 2]]), name
    assert set(make("swiglu")[0].tensors()) == {"gate_up", "down"}


def test_few_tokens_take_several_batches_so_that_weights_leave_the_cache(monkeypatch):
    monkeypatch.setattr(gpu_small, "route", lambda shape: gpu_layers.route(shape, device="cpu"))
    monkeypatch.setattr(gpu_small, "CACHE_BYTES", 5 * 2 * (3 * 3 * 64 * 32 + 2 * 64))
    batches, busy = gpu_small.draw_batches((1, 64, 32, 8, 3))
    assert (len(batches), busy) == (5, 3.0)
    batches, busy = gpu_small.draw_batches((64, 64, 32, 8, 3))
    assert (len(batches), busy) == (2, 8.0)


def test_in_turn_cycles():
    calls = []
    run = gpu_small.in_turn([lambda: calls.append("a"), lambda: calls.append("b")])
    for _ in range(3):
        run()
    assert calls == ["a", "b", "a"]


def test_short_work_is_repeated_between_events(monkeypatch):
    counts = []

    def measure(run, rounds):
        before = len(counts)
        run()
        return {"cool": 2.0 * (len(counts) - before), "hot": 4.0 * (len(counts) - before)}

    monkeypatch.setattr(gpu_timing, "timed", lambda run, rounds: None)
    monkeypatch.setattr(gpu_timing, "times_ms", lambda events: [0.02])
    monkeypatch.setattr(gpu_timing, "measure", measure)
    assert gpu_timing.measure_short(lambda: counts.append(1), 11) == {"cool": 2.0, "hot": 4.0}
    assert len(counts) == 25  # half a millisecond


def test_every_row_names_its_run_and_its_group(monkeypatch):
    speeds = itertools.count(1)
    monkeypatch.setattr(gpu_compare, "bandwidth_gb_s", lambda rounds: {"copy": next(speeds)})
    monkeypatch.setattr(gpu_compare, "compare", lambda name, library, o: {"copy": o.copy})
    options = gpu_compare.parse_options(["--shapes", "olmoe,odd/scout"])
    results = list(gpu_compare.run_part("compare", None, options, "r1118-1042"))
    assert [(r["shape"], r["run"], r["copy"]) for r in results] == [
        ("olmoe", "r1118-1042-1", 1), ("odd", "r1118-1042-1", 1), ("scout", "r1118-1042-2", 2)]


def test_defaults_are_all_shapes_beside_torch_compile():
    options = gpu_compare.parse_options([])
    assert len(options.shapes[0]) == 12
    assert options.rows == ["switchyard", "compile"]
    assert gpu_compare.parse_options(["--form", "gpt-oss"]).shapes == [["gpt-oss"]]


@pytest.mark.parametrize("arguments, message", [
    (["--rows", "compile"], "--rows must contain switchyard"),
    (["--rows", "switchyard,eager"], "is not one of"),
    (["--shapes", "tiny"], "tiny is neither TxHxIxExK nor one of"),
    (["--rounds", "3"], "--rounds (3) must be at least 10"),
])
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu_compare.parse_options(arguments)
    assert message in capsys.readouterr().err


def test_a_comparison_of_bits_counts_and_names_what_differs():
    results = {"y": torch.zeros(4, 3, dtype=torch.bfloat16), "d_weights": torch.ones(4, 2)}
    comparison = gpu_bits.Comparison("odd")
    for what in ("first", "second", "third"):
        comparison.add(what, results)
    assert (comparison.steps, comparison.numbers) == (3, 2 * (12 + 8))
    with pytest.raises(SystemExit, match="odd, a graph: other bits of y$"):
        comparison.add("a graph", results | {"y": -results["y"]})
    with pytest.raises(SystemExit, match="odd, first: d_weights is not finite"):
        gpu_bits.Comparison("odd").add("first", results | {"d_weights": torch.full((1,), torch.nan)})


def test_bits_are_compared_in_every_way():
    ways = gpu_bits.all_ways()
    assert ways[0] == gpu_layers.Way() and len(set(ways)) == len(ways) == 20
    assert str(ways[-1]) == "exact sizing, alignment 128, rows"
