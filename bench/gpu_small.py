# SPDX-License-Identifier: Apache-2.0
"""The part of gpu_compare.py that times forwards of few tokens, as in inference."""
import contextlib
import itertools
import math
import sys

import torch

from gpu_floors import HEATS, dense_sizes, forward_bytes, forward_floor
from gpu_layers import Batch, Switchyard, Weights, compare_results, route
from gpu_report import EAGER, GATHERED, GRAPH, OURS
from gpu_shapes import shape_of
from gpu_timing import bandwidth_gb_s, dense_tflops, measure_short
from gpu_torch_layers import (BestTorchExperts, GatheredTorchExperts, TorchExperts, TorchGraph,
                              TorchLayer)

CACHE_BYTES = 400 << 20  # several times a GPU's cache
GATHERED_BYTES = 2 << 30  # beyond, copying the matrices of every pick takes too long


def draw_batches(shape):
    """Draws as many batches as are needed for their weights not to stay in the cache."""
    _, _, _, e, k = shape
    num_bytes = forward_bytes(shape, min(e, shape[0] * k))
    batches = [Batch(shape, route(shape)) for _ in range(math.ceil(CACHE_BYTES / num_bytes))]
    busy = sum((batch.rows > 0).sum().item() for batch in batches) / len(batches)
    return batches, busy


def in_turn(functions):
    """Returns a function that calls the next one each time."""
    turns = itertools.cycle(functions)
    return lambda: next(turns)()


class FewTokens:
    """Times one shape with a number of tokens."""

    def __init__(self, shape, weights, library, options):
        self.shape, self.weights = shape, weights
        self.library, self.options = library, options
        self.batches, self.busy = draw_batches(shape)
        module = TorchExperts(weights, shape[4])
        self.expected = [TorchLayer(module, batch).forward() for batch in self.batches]

    def name(self):
        return f"{self.shape[0]} tokens"

    def measure(self, functions):
        return measure_short(in_turn(functions), self.options.rounds)

    def check(self, label, results):
        for result, expected in zip(results, self.expected, strict=True):
            compare_results(f"{self.name()}, {label}", {"y": (result, expected)})

    def ours(self, rows):
        times = {}
        with contextlib.ExitStack() as stack:
            layers = [stack.enter_context(Switchyard(self.library, self.weights, batch,
                                                     self.options, training=False))
                      for batch in self.batches]
            for layer in layers:
                layer.capture_forward()
                torch.cuda.synchronize()
                eagerly = layer.y.clone()
                layer.y.fill_(torch.nan)
                layer.replay()
                if not torch.equal(layer.y, eagerly):
                    sys.exit(f"{self.name()}: a graph's results differ from those without one")
            self.check(OURS, [layer.y for layer in layers])
            times[OURS] = self.measure([layer.replay for layer in layers])
            if "eager" in rows:
                times[EAGER] = self.measure([layer.forward for layer in layers])
        return times

    def torch_graphs(self, label, experts):
        torch.compiler.reset()  # a code object allows only a few compilations
        compiled = torch.compile(experts, dynamic=False)
        graphs = [TorchGraph(compiled, batch) for batch in self.batches]
        for graph in graphs:
            graph.replay()
        self.check(label, [graph.y for graph in graphs])
        return {label: self.measure([graph.replay for graph in graphs])}

    def run(self, rows):
        t, h, i, _, k = self.shape
        times = self.ours(rows)
        if "graph" in rows:
            times |= self.torch_graphs(GRAPH, BestTorchExperts(self.weights, k))
        if "gather" in rows and t * k * 6 * h * i <= GATHERED_BYTES:
            times |= self.torch_graphs(GATHERED, GatheredTorchExperts(self.weights))
        return times


def microseconds(times):
    return {heat: 1e3 * times[heat] for heat in HEATS}


def small(name, library, options, say):
    """Runs the batches of one shape. Their times are in µs."""
    _, h, i, e, k = full = shape_of(name)
    bandwidth = bandwidth_gb_s(options.rounds)
    ceiling = dense_tflops(*dense_sizes(full)["up"], options.rounds)
    torch.cuda.empty_cache()
    weights = Weights(full, options.form)
    batches = []
    for t in options.small_tokens:
        say(f"  {t} tokens")
        shape = (t, h, i, e, k)
        few = FewTokens(shape, weights, library, options)
        floors = {heat: forward_floor(shape, few.busy, bandwidth["best"][heat] * 1e9,
                                      ceiling[heat] * 1e12) for heat in HEATS}
        batches.append({"tokens": t, "busy_experts": few.busy, "bound": floors["hot"][1],
                        "floor": microseconds({heat: floors[heat][0] for heat in HEATS}),
                        "layers": {label: microseconds(times) for label, times in
                                   few.run(options.small_rows).items()}})
    return {"sizes": full, "bandwidth": bandwidth["best"], "bandwidths": bandwidth,
            "ceiling": ceiling, "batches": batches}
