#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times Switchyard's layer beside torch's, on the same inputs and in one run.

bits     checks that ours has the same bits from run to run, in a graph, and at every alignment and
         sizing, whether experts read tokens or rows
compare  forward and forward+backward of both at the shapes of known models, beside their floors
skew     ours under skewed routing and with experts that have no rows
small    ours with few tokens, as in inference, beside the limit set by memory bandwidth

--rows says which layers compare times:
  switchyard  ours
  torch       TorchTitan's algorithm: argsort, gather, three torch._grouped_mm, weighted scatter-add
  compile     the same under torch.compile
  best        the best that a user can write: gate and up in one product, combine and d_x by the
              inverse permutation, max-autotune-no-cudagraphs, which takes long to compile

The routing is given, the data are random, and weights and their gradients are bf16 on both sides.
Results are compared before anything is timed. Times are medians from CUDA events: cool, in short
bursts after 0.15 s without work, and hot, after 0.3 s of the same work. Dense cuBLAS products and a
copy, timed the same way, set the floors. --shapes takes groups, as in a,b/c,d; a copy is timed
before each group, dense products before each shape, and every row names its run and group.
"""
import argparse
import datetime
import json
import sys
import time

import torch

from gpu_bits import bits
from gpu_floors import dense_sizes
from gpu_layers import Batch, Switchyard, Weights, check_best, check_step, load_library, route
from gpu_report import BEST, COMPILED, OURS, PARTS, TABLES, heading
from gpu_shapes import SHAPES, parse_groups, parse_names, shape_of
from gpu_small import small
from gpu_timing import bandwidth_gb_s, dense_ceilings, dense_tflops, measure
from gpu_torch_layers import FORMS, BestTorchExperts, TorchExperts, TorchLayer

ROWS = ("switchyard", "torch", "compile", "best")
SMALL_ROWS = ("switchyard", "eager", "graph", "gather")
SMALL_TOKENS = [1, 2, 4, 8, 16, 32, 64, 256, 1024]
START = time.monotonic()


def say(text):
    print(f"{time.monotonic() - START:5.0f} s  {text}", file=sys.stderr, flush=True)


def measure_layer(layer, rounds):
    return {"forward": measure(layer.forward, rounds), "step": measure(layer.step, rounds)}


def measure_ours(ours, rounds):
    """Measures the memory of training first, before other work has taken some of its own."""
    before = ours.numbers()
    ours.training_forward()
    saved = ours.numbers()
    ours.backward()
    after = ours.numbers()
    tokens = ours.y.shape[0]
    return ({"host_syncs": after.host_syncs - before.host_syncs,
             "saved_activations": saved.saved_activations / tokens,
             "saved_integers": saved.saved_integers / tokens},
            {"peak_bytes": after.bytes_held, **measure_layer(ours, rounds)})


def measure_torch(module, weights, batch, options):
    """Measures the wanted layers of torch, by label."""
    ways = {"torch": ("torch", module, None), "compile": (COMPILED, module, "default")}
    if "best" in options.rows:
        best = BestTorchExperts(weights, batch.shape[4])
        check_best("torch", batch, module, best)
        ways["best"] = (BEST, best, "max-autotune-no-cudagraphs")
    layers = {}
    for row, (label, experts, mode) in ways.items():
        if row not in options.rows:
            continue
        say(f"  {label}")
        theirs = TorchLayer(experts, batch, mode)
        layers[label] = {"peak_bytes": theirs.peak_bytes(),
                         **measure_layer(theirs, options.rounds)}
        theirs.clear()
    return layers


def compare(name, library, options):
    shape = shape_of(name)
    say("  ceilings")
    ceilings = {"dense": dense_ceilings(shape, options.rounds), "copy": options.copy}
    torch.cuda.empty_cache()
    weights = Weights(shape, options.form)
    batch = Batch(shape, route(shape))
    module = TorchExperts(weights, shape[4])
    with Switchyard(library, weights, batch, options) as ours:
        say("  results")
        result = {"sizes": shape, "ceilings": ceilings,
                  "busy_experts": (batch.rows > 0).sum().item(),
                  "errors": check_step(name, batch, module, ours)}
        layers = measure_torch(module, weights, batch, options)
        say(f"  {OURS}")
        numbers, layers[OURS] = measure_ours(ours, options.rounds)
    return result | numbers | {"layers": layers}


def skew(name, library, options):
    shape = shape_of(name)
    t, h, i, e, k = shape
    ceiling = dense_tflops(*dense_sizes(shape)["up"], options.rounds)
    weights = Weights(shape, options.form)
    half = torch.randperm(e, device="cuda")[:e // 2].sort().values
    on_half = route(shape, experts=half)
    alone = (t, h, i, e // 2, k)
    renumbered = torch.searchsorted(half, on_half)
    cases = {  # all have the same number of rows
        "balanced": (shape, weights, route(shape)),
        "zipf 1.0": (shape, weights, route(shape, exponent=1.0)),
        f"{e - e // 2} of {e} empty": (shape, weights, on_half),
        f"the other {e // 2} alone": (alone, weights.of(half), renumbered),
    }
    routings = {}
    for case, (sizes, matrices, ids) in cases.items():
        say(f"  {case}")
        batch = Batch(sizes, ids)
        with Switchyard(library, matrices, batch, options) as ours:
            errors = check_step(f"{name}, {case}", batch, TorchExperts(matrices, k), ours)
            routings[case] = {"errors": errors, "step": measure(ours.step, options.rounds),
                              "fullest": (batch.rows.max() / batch.rows.float().mean()).item(),
                              "empty": (batch.rows == 0).sum().item()}
    empty, without = list(cases)[2:]
    routings[empty]["beside"] = without
    return {"sizes": shape, "ceiling": ceiling, "routings": routings}


def on_a_stream(part):
    """Returns the part on a stream of its own, since the default stream cannot be captured."""
    def run(name, library, options):
        with torch.cuda.stream(torch.cuda.Stream()):
            return part(name, library, options, say)
    return run


def groups_of(part, options):
    """Returns the groups of shapes of a part."""
    return {"bits": options.shapes, "compare": options.shapes, "skew": [options.skew_shapes],
            "small": [options.small_shapes]}[part]


def run_part(part, library, options, run):
    """Yields the result of one shape after the other."""
    work = {"bits": on_a_stream(bits), "compare": compare, "skew": skew,
            "small": on_a_stream(small)}[part]
    groups = groups_of(part, options)
    total, done = sum(len(names) for names in groups), 0
    for number, names in enumerate(groups, 1):
        if part == "compare":
            options.copy = bandwidth_gb_s(options.rounds)["copy"]
        for name in names:
            done += 1
            say(f"{part} {done} of {total}: {name}")
            torch.cuda.empty_cache()
            torch.manual_seed(options.seed)
            yield {"shape": name, "run": f"{run}-{number}", "form": options.form,
                   **work(name, library, options)}


def names_among(known):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown} is not one of {list(known)}")
        return names
    return parse


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/gpu/bench/libswitchyard_gpu_compare.so")
    parser.add_argument("--only", type=names_among(PARTS), default=["compare", "skew", "small"],
                        help="a,b of " + ", ".join(PARTS) + "; all but bits by default")
    parser.add_argument("--form", choices=FORMS, default="swiglu",
                        help="gpt-oss: biases and a clamped SwiGLU, at gpt-oss's shape by default")
    parser.add_argument("--rows", type=names_among(ROWS), default=["switchyard", "compile"],
                        help="of compare: a,b of " + ", ".join(ROWS))
    parser.add_argument("--shapes", type=parse_groups,
                        help="of bits and compare: a,b/c,d; all by default")
    parser.add_argument("--skew-shapes", type=parse_names, default=["qwen3-30b", "olmoe"])
    parser.add_argument("--small-shapes", type=parse_names, default=["qwen3-30b"])
    parser.add_argument("--small-tokens", default=SMALL_TOKENS,
                        type=lambda text: [int(t) for t in text.split(",")])
    parser.add_argument("--small-rows", type=names_among(SMALL_ROWS),
                        default=["switchyard", "graph", "gather"],
                        help="a,b of " + ", ".join(SMALL_ROWS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--alignment", type=int, default=1, help="of each expert's rows")
    parser.add_argument("--kernels", choices=["best", "portable"], default="best", help="of ours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args(arguments)
    if options.rounds < 10:
        parser.error(f"--rounds ({options.rounds}) must be at least 10")
    if "switchyard" not in options.rows:
        parser.error("--rows must contain switchyard, beside which the others stand")
    if not options.shapes:
        options.shapes = [["gpt-oss"] if options.form == "gpt-oss" else list(SHAPES)]
    return options


def main():
    options = parse_options()
    library = load_library(options.library)
    now = datetime.datetime.now()
    everything = {"run": now.strftime("r%m%d-%H%M%S"), "date": str(now.date()),
                  "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                  "options": vars(options).copy()}
    print(heading(everything))
    for part in options.only:
        results = everything[part] = []
        for result in run_part(part, library, options, everything["run"]):
            results.append(result)
            if options.json:  # now, so that a later failure cannot lose it
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(everything, file, indent=1)
        print(f"\n{TABLES[part](results)}", flush=True)
    say("done")


if __name__ == "__main__":
    main()
