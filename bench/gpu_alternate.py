#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times two builds of the library in turns, to show what a change costs.

  gpu_alternate.py OLD/libswitchyard_gpu_compare.so NEW/libswitchyard_gpu_compare.so

Each build runs in its own process, because both have the same library name. The two processes hold
the same inputs, and time forward+backward in turns while the other one is idle. With --forward they
time the forward in a graph, for shapes of few tokens such as 1x2048x768x128x8. The table shows the
medians over the turns, cool and hot, and the ratio new / old.
"""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys

from gpu_floors import HEATS
from gpu_report import pair, table
from gpu_shapes import SHAPES, parse_names, shape_of

BURSTS = 3  # a turn is short, because there are several


def require_own_library(build):
    """Exits if a build, such as one that was copied, has loaded the library of the other one."""
    maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = {line.split()[-1] for line in maps if "/libswitchyard.so" in line}
    if not all(pathlib.Path(path).is_relative_to(build) for path in found):
        sys.exit(f"{build} uses {found}")


def await_turn():
    """Waits for a line from the parent, and exits if there is no more."""
    if not sys.stdin.readline():
        sys.exit(1)


@contextlib.contextmanager
def steps_of(name, library, options):
    """Checks forward+backward of a shape, and yields a function that times it."""
    from gpu_layers import Batch, Switchyard, Weights, check_step, route
    from gpu_timing import measure
    from gpu_torch_layers import TorchExperts

    shape = shape_of(name)
    weights = Weights(shape)
    batch = Batch(shape, route(shape))
    with Switchyard(library, weights, batch, options) as ours:
        check_step(name, batch, TorchExperts(weights, shape[4]), ours)
        yield lambda: measure(ours.step, options.rounds, bursts=BURSTS)


@contextlib.contextmanager
def forwards_of(name, library, options):
    """Checks the forward of few tokens in a graph, and yields a function that times it."""
    import torch
    from gpu_layers import Weights
    from gpu_report import OURS
    from gpu_small import FewTokens

    shape = shape_of(name)
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        few = FewTokens(shape, Weights(shape), library, options)
        few.ours([])
        yield lambda: few.ours([])[OURS]


def serve(path, options):
    """Answers the parent on behalf of one build. For every shape it first checks results, then
    prints the times of its turns. It uses the GPU only when asked to."""
    import torch  # imported here, and above, because the parent needs no GPU
    from gpu_layers import load_library

    library = load_library(path)
    require_own_library(pathlib.Path(path).resolve().parent.parent)
    timed_work = forwards_of if options.forward else steps_of
    for name in options.shapes:
        await_turn()
        torch.manual_seed(0)
        with timed_work(name, library, options) as measure_turn:
            print(json.dumps("ready"), flush=True)
            for _ in range(options.turns):
                await_turn()
                print(json.dumps(measure_turn()), flush=True)
        del measure_turn  # and the tensors that it holds
        torch.cuda.empty_cache()


class Build:
    """One build, in a process of its own."""

    def __init__(self, path, options):
        command = [sys.executable, __file__, path, path, "--child", "--turns", str(options.turns),
                   "--rounds", str(options.rounds), "--kernels", options.kernels,
                   "--shapes", ",".join(options.shapes)]
        command += ["--forward"] * options.forward
        folder = pathlib.Path(path).resolve().parent
        environment = os.environ | {"LD_LIBRARY_PATH": f"{folder.parent / 'lib'}:{folder.parent}"}
        self.path = path
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.path}: the process ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def alternate(builds, turns):
    """Returns the median times of one shape, by name of the build."""
    times = {name: [] for name in builds}
    for build in builds.values():
        build.ask()
    for build in builds.values():
        build.answer()  # both are ready
    for _ in range(turns):
        for name, build in builds.items():
            build.ask()
            times[name].append(build.answer())
    return {name: {heat: statistics.median(turn[heat] for turn in of_turns) for heat in HEATS}
            for name, of_turns in times.items()}


def ratio_table(results):
    """Returns a table of the medians, by shape."""
    return table(["shape", "old, ms", "new, ms", "new / old"],
                 [[shape, pair(times["old"], "{:.4f}"), pair(times["new"], "{:.4f}"),
                   pair({heat: times["new"][heat] / times["old"][heat] for heat in HEATS},
                        "{:.4f}")] for shape, times in results.items()])


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--turns", type=int, default=3, help="turns of each build")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--shapes", type=parse_names, default=list(SHAPES))
    parser.add_argument("--kernels", choices=["best", "portable"], default="best")
    parser.add_argument("--forward", action="store_true", help="of few tokens, in a graph")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.forward and options.shapes == list(SHAPES):
        parser.error("--forward is for few tokens: --shapes must name such shapes, as in "
                     "1x2048x768x128x8")
    options.alignment = 1
    return options


def main():
    options = parse_options()
    if options.child:
        serve(options.old, options)
        return
    builds = {"old": Build(options.old, options), "new": Build(options.new, options)}
    results = {}
    for shape in options.shapes:
        results[shape] = alternate(builds, options.turns)
        print(f"{shape}: new / old "
              + pair({heat: results[shape]["new"][heat] / results[shape]["old"][heat]
                      for heat in HEATS}, "{:.4f}"), file=sys.stderr, flush=True)
    print(ratio_table(results))


if __name__ == "__main__":
    main()
