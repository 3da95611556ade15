#!/usr/bin/env python3
"""Times Switchyard's layer beside torch's, on the same inputs and in one run.

compare  forward and forward+backward of both at the shapes of known models
skew     ours under skewed routing and with experts that have no rows
small    ours with few tokens, as in inference, beside the limit set by memory bandwidth

Torch runs TorchTitan's algorithm (argsort, gather, three torch._grouped_mm, weighted scatter-add),
eager and under torch.compile, and the best that a user can write (gate and up in one product,
combine and d_x by the inverse permutation, max-autotune-no-cudagraphs). The routing is given, the
data are random, and weights and their gradients are bf16 on both sides. Results are compared before
anything is timed. Times are medians from CUDA events: cool, in short bursts after 0.15 s without
work, and hot, after 0.3 s of the same work. A dense cuBLAS product, timed the same way, stands
beside each.
"""
import argparse
import datetime
import json
import sys
import time

import torch

from gpu_layers import (BestTorchExperts, Batch, Switchyard, TorchExperts, TorchLayer, Weights,
                        check_best, check_forward, check_step, load_library, route)
from gpu_report import (BEST, COMPILED, GRAPH, HEATS, OURS, SHAPES, compare_tables, forward_floor,
                        pair, skew_table, small_table)
from gpu_timing import DenseGemm, bandwidth_gb_s, measure

SLOW_S = 45  # seconds for one shape; longer deserves a warning
SMALL_SHAPE = "qwen3-30b"


def say(text):
    print(text, file=sys.stderr, flush=True)


def measure_layer(layer, gemm, rounds):
    return {"ceiling": gemm.tflops(rounds), "forward": measure(layer.forward, rounds),
            "step": measure(layer.step, rounds)}


def measure_ours(ours, gemm, rounds):
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
            {"peak_bytes": after.bytes_held, **measure_layer(ours, gemm, rounds)})


def compare(name, library, options):
    shape = SHAPES[name]
    torch.manual_seed(options.seed)
    weights = Weights(shape)
    batch = Batch(shape, route(shape))
    module = TorchExperts(weights, shape[3], shape[4])
    gemm = DenseGemm(shape)
    layers = {}
    with Switchyard(library, weights, batch, options) as ours:
        result = {"shape": name, "sizes": shape, "layers": layers,
                  "errors": check_step(name, batch, module, ours)}
        best = BestTorchExperts(weights, shape[3], shape[4])
        check_best(name, batch, module, best)
        ways = {"torch": (module, None), COMPILED: (module, "default"),
                BEST: (best, "max-autotune-no-cudagraphs")}
        for label, (experts, mode) in ways.items():
            if mode and not options.compile:
                continue
            say(f"  {label}")
            theirs = TorchLayer(experts, batch, mode)
            layers[label] = {"peak_bytes": theirs.peak_bytes(),
                             **measure_layer(theirs, gemm, options.rounds)}
            theirs.clear()
        say(f"  {OURS}")
        numbers, layers[OURS] = measure_ours(ours, gemm, options.rounds)
    return result | numbers


def skew(name, library, options):
    shape = SHAPES[name]
    t, h, i, e, k = shape
    torch.manual_seed(options.seed)
    weights = Weights(shape)
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
    gemm = DenseGemm(shape)
    routings = {}
    for case, (sizes, matrices, ids) in cases.items():
        say(f"  {case}")
        batch = Batch(sizes, ids)
        with Switchyard(library, matrices, batch, options) as ours:
            errors = check_step(f"{name}, {case}", batch, TorchExperts(matrices, sizes[3], k), ours)
            routings[case] = {"errors": errors, "ceiling": gemm.tflops(options.rounds),
                              "step": measure(ours.step, options.rounds),
                              "fullest": (batch.rows.max() / batch.rows.float().mean()).item(),
                              "empty": (batch.rows == 0).sum().item()}
    empty, without = list(cases)[2:]
    routings[empty]["beside"] = without
    return {"shape": name, "sizes": shape, "routings": routings}


def small(library, options):
    torch.manual_seed(options.seed)
    _, h, i, e, k = SHAPES[SMALL_SHAPE]
    bandwidth = bandwidth_gb_s(options.rounds)
    torch.cuda.empty_cache()
    # 1.2 GB, nearly all of which every forward reads, so a cache of 50 MB does not help.
    weights = Weights(SHAPES[SMALL_SHAPE])
    module = TorchExperts(weights, e, k)
    ceiling = DenseGemm(SHAPES[SMALL_SHAPE]).tflops(options.rounds)
    batches = []
    for t in options.small_tokens:
        say(f"  {t} tokens")
        shape = (t, h, i, e, k)
        batch = Batch(shape, route(shape))
        busy = (batch.rows > 0).sum().item()
        floors = {heat: forward_floor(shape, busy, bandwidth["best"][heat] * 1e9,
                                      ceiling[heat] * 1e12) for heat in HEATS}
        result = {"sizes": shape, "busy_experts": busy,
                  "floor": {heat: floors[heat][0] for heat in HEATS}, "bound": floors["hot"][1]}
        result |= measure_small(batch, weights, module, library, options)
        batches.append(result)
    return {"bandwidth": bandwidth["best"], "bandwidths": bandwidth, "ceiling": ceiling,
            "batches": batches}


def measure_small(batch, weights, module, library, options):
    name = f"{batch.shape[0]} tokens"
    result = {}
    with Switchyard(library, weights, batch, options, training=False) as ours:
        result["errors"] = check_forward(name, batch, module, ours)
        eagerly = ours.y.clone()
        ours.capture_forward()
        ours.y.fill_(torch.nan)
        ours.replay()
        if not torch.equal(ours.y, eagerly):
            sys.exit(f"{name}: a graph's results differ from those without one")
        result["eager"] = measure(ours.forward, options.rounds)
        result["graph"] = measure(ours.replay, options.rounds)
    if options.compile:
        for label, mode in ((COMPILED, "default"), (GRAPH, "reduce-overhead")):
            theirs = TorchLayer(module, batch, mode)
            for _ in range(3):  # torch captures in the second call
                theirs.forward()
            result[label] = measure(theirs.forward, options.rounds)
    return result


def each_shape(run, names, library, options):
    results = []
    for name in names:
        say(f"{run.__name__}: {name}")
        begin = time.monotonic()
        results.append(run(name, library, options))
        torch.cuda.empty_cache()
        seconds = time.monotonic() - begin
        say(f"  {seconds:.0f} s" + (": slow" if seconds > SLOW_S else ""))
    return results


def run_part(part, library, options):
    """Runs a part, and returns its results and its table."""
    if part == "compare":
        results = each_shape(compare, options.shapes, library, options)
        return results, compare_tables(results)
    if part == "skew":
        results = each_shape(skew, options.skew_shapes, library, options)
        return results, skew_table(results)
    say(f"small: {SMALL_SHAPE}")
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        results = small(library, options)
    return results, small_table(results)


def names_among(known):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown} is none of {list(known)}")
        return names
    return parse


def parse_options():
    parts = ["compare", "skew", "small"]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/gpu/bench/libswitchyard_gpu_compare.so")
    parser.add_argument("--only", type=names_among(parts), default=parts, help="parts, as a,b")
    parser.add_argument("--shapes", type=names_among(SHAPES), default=list(SHAPES),
                        help="of compare")
    parser.add_argument("--skew-shapes", type=names_among(SHAPES), default=["qwen3-30b", "olmoe"])
    parser.add_argument("--small-tokens", default=[64, 256, 1024],
                        type=lambda text: [int(t) for t in text.split(",")])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--alignment", type=int, default=1, help="of each expert's rows")
    parser.add_argument("--kernels", choices=["best", "portable"], default="best", help="of ours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="leave torch.compile out")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    if options.rounds < 10:
        parser.error(f"--rounds ({options.rounds}) must be at least 10")
    return options


def main():
    options = parse_options()
    library = load_library(options.library)
    everything = {"date": str(datetime.date.today()), "gpu": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "options": vars(options)}
    print(f"{everything['date']}, {everything['gpu']}, torch {torch.__version__}; bf16, routing "
          f"given, {options.kernels} kernels; cool / hot, medians")
    for part in options.only:
        everything[part], text = run_part(part, library, options)
        print(f"\n{text}", flush=True)
        if options.json:  # now, so that a later failure cannot lose them
            with open(options.json, "w") as file:
                json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
