#!/usr/bin/env python3
"""Times two builds of the library in turns, to show what a change costs.

  gpu_alternate.py OLD/libswitchyard_gpu_compare.so NEW/libswitchyard_gpu_compare.so

Each turn runs in its own process, because both builds have the same library name. The table shows
the medians of forward+backward over the turns, cool and hot, and the ratio new / old.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from gpu_report import HEATS, SHAPES


def shape_of(name):
    """Returns a known shape, or parses T x H x I x E x K, as in 16384x2048x768x128x1."""
    return SHAPES.get(name) or tuple(int(size) for size in name.split("x"))


def require_own_library(build):
    """Exits if a build, such as one that was copied, has loaded the library of the other one."""
    maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = {line.split()[-1] for line in maps if "/libswitchyard.so" in line}
    if not all(pathlib.Path(path).is_relative_to(build) for path in found):
        sys.exit(f"{build} uses {found}")


def step_times(path, options):
    """Returns the step times of one build, by shape. Runs in a child process."""
    import torch  # imported here because the parent needs no GPU
    from gpu_layers import Batch, Switchyard, TorchExperts, Weights, check_step, load_library, route
    from gpu_timing import measure

    library, times = load_library(path), {}
    require_own_library(pathlib.Path(path).resolve().parent.parent)
    for name in options.shapes:
        torch.manual_seed(0)
        shape = shape_of(name)
        weights = Weights(shape)
        batch = Batch(shape, route(shape))
        with Switchyard(library, weights, batch, options) as ours:
            check_step(name, batch, TorchExperts(weights, shape[3], shape[4]), ours)
            times[name] = measure(ours.step, options.rounds)
        torch.cuda.empty_cache()
    return times


def turn(path, options):
    command = [sys.executable, __file__, path, path, "--child", "--rounds", str(options.rounds),
               "--kernels", options.kernels, "--shapes", ",".join(options.shapes)]
    folder = pathlib.Path(path).resolve().parent
    environment = os.environ | {"LD_LIBRARY_PATH": f"{folder.parent / 'lib'}:{folder.parent}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--turns", type=int, default=3, help="of each")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--kernels", choices=["best", "portable"], default="best")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.alignment = 1
    if options.child:
        print(json.dumps(step_times(options.old, options)))
        return
    turns = {"old": [], "new": []}
    for i in range(options.turns):
        for name, path in (("old", options.old), ("new", options.new)):
            print(f"turn {i + 1} of {options.turns}: {name}", file=sys.stderr, flush=True)
            turns[name].append(turn(path, options))
    print("| shape | heat | old, ms | new, ms | new / old |\n|---|---|---|---|---|")
    for shape in options.shapes:
        for heat in HEATS:
            old, new = (statistics.median(times[shape][heat] for times in turns[name])
                        for name in ("old", "new"))
            print(f"| {shape} | {heat} | {old:.3f} | {new:.3f} | {new / old:.4f} |")


if __name__ == "__main__":
    main()
