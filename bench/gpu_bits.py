# SPDX-License-Identifier: Apache-2.0
"""The part of gpu_compare.py that compares bits: of every way to run a step, and from run to run."""
import itertools
import sys

import torch

from gpu_layers import Batch, Switchyard, Way, Weights, route
from gpu_shapes import shape_of

ALIGNMENTS = (1, 8, 16, 64, 128)
EXPONENTS = {"balanced": 0.0, "zipf 1.0": 1.0}


def all_ways():
    return [Way(*choice) for choice in itertools.product(ALIGNMENTS, (False, True), (False, True))]


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


class Comparison:
    """Compares the results of steps with those of the first one."""

    def __init__(self, name):
        self.name = name
        self.expected = None
        self.steps = self.numbers = 0

    def add(self, what, results):
        self.steps += 1
        if self.expected is None:
            infinite = [name for name, tensor in results.items()
                        if not torch.isfinite(tensor).all()]
            if infinite:
                sys.exit(f"{self.name}, {what}: {', '.join(infinite)} is not finite")
            self.expected = {name: tensor.clone() for name, tensor in results.items()}
            return
        different = [name for name, tensor in results.items()
                     if not same_bits(tensor, self.expected[name])]
        if different:
            sys.exit(f"{self.name}, {what}: other bits of {', '.join(different)}")
        self.numbers += sum(tensor.numel() for tensor in results.values())


def run_ways(comparison, library, weights, batch, options):
    """Runs a step in every way, and in the first way twice more, the last time as a graph."""
    for number, way in enumerate(all_ways()):
        with Switchyard(library, weights, batch, options, way=way) as ours:
            ours.step()
            comparison.add(str(way), ours.results())
            if number > 0:
                continue
            ours.forget_results()
            ours.step()
            comparison.add("a second run", ours.results())
            ours.capture_step()
            ours.forget_results()
            ours.replay()
            comparison.add("a graph", ours.results())


def bits(name, library, options, say):
    """Exits, and names what differs, unless all steps at this shape have the same bits."""
    shape = shape_of(name)
    weights = Weights(shape, options.form)
    routings = {}
    for routing, exponent in EXPONENTS.items():
        say(f"  {routing}")
        comparison = Comparison(f"{name}, {routing}")
        run_ways(comparison, library, weights, Batch(shape, route(shape, exponent)), options)
        routings[routing] = {"steps": comparison.steps, "numbers": comparison.numbers}
    return {"sizes": shape, "routings": routings}
