#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the measurements of gpu_compare.py into floors, shares and tables. Needs no torch.

  gpu_report.py RESULTS.json …

merges the results of several runs into one set of tables, in which every row names its run.
"""
import json
import pathlib
import sys

from gpu_floors import (HEATS, saved_bytes_wanted, stage_floor, step_floor, step_flops,
                        step_stages)

OURS, COMPILED = "switchyard", "torch.compile"
BEST = "torch, best"  # the best that a user of torch can write
GRAPH = "torch, graph"
GATHERED = "torch, gathered"  # the picked experts' matrices, copied
EAGER = "switchyard, eager"
PARTS = ("bits", "compare", "skew", "small")


def tflops(flops, times):
    return {heat: flops / times[heat] * 1e-9 for heat in HEATS}


def ratio(over, under):
    return {heat: over[heat] / under[heat] for heat in HEATS}


def percent(values, of):
    return {heat: 100 * values[heat] / of[heat] for heat in HEATS}


def percent_more(times, base):
    return {heat: 100 * (times[heat] / base[heat] - 1) for heat in HEATS}


def pair(values, form="{:.2f}"):
    return " / ".join(form.format(values[heat]) for heat in HEATS)


def table(header, rows):
    """Returns a Markdown table whose columns also line up in a terminal."""
    lines = [header, *rows]
    widths = [max(len(str(line[c])) for line in lines) for c in range(len(header))]
    text = ["| " + " | ".join(str(cell).ljust(width) for cell, width in zip(line, widths)) + " |"
            for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def label_of(result):
    """Returns the shape's name, with its form if that is not the usual one."""
    form = result.get("form", "swiglu")
    return result["shape"] + (f" ({form} form)" if form != "swiglu" else "")


def name_of(result):
    return f"{label_of(result)} {','.join(str(n) for n in result['sizes'])}"


def floor_of(result):
    return step_floor(result["sizes"], result["busy_experts"], result["ceilings"])


def bits_table(results):
    """Returns how many steps had the bits of the first, and how many numbers were compared."""
    rows = [[name_of(result), result["run"], routing, case["steps"], f"{case['numbers']:.2e}"]
            for result in results for routing, case in result["routings"].items()]
    return "Steps with the same bits.\n\n" + table(
        ["T, H, I, E, K", "run", "routing", "steps", "numbers compared"], rows)


def time_table(results):
    rows = []
    for result in results:
        layers, dense = result["layers"], result["ceilings"]["dense"]["up"]
        floor = floor_of(result)
        for label, layer in layers.items():
            reached = tflops(step_flops(result["sizes"]), layer["step"])
            faster = [pair(ratio(layers[than]["step"], layer["step"]), "{:.2f}x")
                      if than in layers else "-" for than in (COMPILED, BEST)]
            rows.append([name_of(result), result["run"], label, pair(dense, "{:.0f}"),
                         pair(layer["forward"]), pair(layer["step"]), pair(reached, "{:.0f}"),
                         pair(percent(reached, dense), "{:.0f}%"), pair(floor),
                         pair(percent(floor, layer["step"]), "{:.0f}%"), *faster])
    return table(["T, H, I, E, K", "run", "layer", "dense GEMM, TF", "fwd, ms", "fwd+bwd, ms",
                  "fwd+bwd, TF", "of dense GEMM", "floor, ms", "of floor",
                  f"faster than {COMPILED}", f"than {BEST}"], rows)


def memory_table(results):
    labels = list(dict.fromkeys(label for result in results for label in result["layers"]))
    rows = []
    for result in results:
        peaks = [f"{result['layers'][label]['peak_bytes'] / 2**20:.0f}"
                 if label in result["layers"] else "-" for label in labels]
        rows.append([label_of(result), result["run"], *peaks,
                     f"{result['saved_activations']:.0f} + {result['saved_integers']:.0f}",
                     saved_bytes_wanted(result["sizes"]), result["host_syncs"]])
    return table(["shape", "run", *labels, "saved", "2H + 4KI", "host syncs"], rows)


def floor_table(results):
    """Returns the floor of every stage. A star marks those that memory limits when cool."""
    rows = []
    for result in results:
        row = [label_of(result), result["run"]]
        for stage in step_stages(result["sizes"], result["busy_experts"])[1:]:
            floor, bound = stage_floor(stage, result["ceilings"])
            row.append(pair(floor, "{:.3f}") + (" *" if bound == "memory" else ""))
        rows.append(row + [pair(floor_of(result))])
    names = [stage.name for stage in step_stages((1, 1, 1, 1, 1), 1)[1:]]
    return table(["shape", "run", *names, "together"], rows)


def ceiling_table(results):
    names = list(results[0]["ceilings"]["dense"])
    return table(["shape", "run", *[f"as {name}, TF" for name in names], "copy, GB/s"],
                 [[label_of(result), result["run"],
                   *[pair(result["ceilings"]["dense"][name], "{:.0f}") for name in names],
                   pair(result["ceilings"]["copy"], "{:.0f}")] for result in results])


def compare_tables(results):
    """Returns the tables of gpu_compare.compare: times, memory, floors and ceilings."""
    return "\n\n".join([
        time_table(results),
        "Peak memory beyond weights, inputs, outputs and gradients, MiB; what forward saves, bytes "
        "a token (activations + integers of the plan):", memory_table(results),
        "Floors of the stages, ms (*: limited by memory):", floor_table(results),
        "Ceilings of the same run, dense products by cuBLAS and a copy, read and written:",
        ceiling_table(results)])


def skew_table(results):
    """Returns the slowdown against balanced routing, and that of empty experts against none."""
    rows = []
    for result in results:
        routings = result["routings"]
        balanced = routings["balanced"]["step"]
        for name, routing in routings.items():
            step = routing["step"]
            reached = tflops(step_flops(result["sizes"]), step)
            bases = [balanced if name != "balanced" else None,
                     routings[routing["beside"]]["step"] if "beside" in routing else None]
            rows.append([label_of(result), result["run"], name, f"{routing['fullest']:.1f}x",
                         routing["empty"], pair(step), pair(reached, "{:.0f}"),
                         pair(result["ceiling"], "{:.0f}"),
                         *[pair(percent_more(step, base), "{:+.1f}%") if base else ""
                           for base in bases]])
    return table(["shape", "run", "routing", "fullest", "empty", "fwd+bwd, ms", "TF",
                  "dense GEMM, TF", "against balanced", "against the half alone"], rows)


def small_table(results):
    """Returns the times of forwards with few tokens, in µs, and their excess over the floor."""
    labels = [label for label in (OURS, EAGER, GRAPH, GATHERED)
              if any(label in batch["layers"] for r in results for batch in r["batches"])]
    header = ["shape", "run", "T", "experts with rows", "floor", "bound by"]
    for label in labels:
        header += [label, "excess"]
    rows = []
    for result in results:
        for batch in result["batches"]:
            floor = batch["floor"]
            row = [label_of(result), result["run"], batch["tokens"],
                   f"{batch['busy_experts']:.4g}", pair(floor, "{:.1f}"), batch["bound"]]
            for label in labels:
                times = batch["layers"].get(label)
                row += [pair(times, "{:.1f}"),
                        pair({heat: times[heat] - floor[heat] for heat in HEATS}, "{:.1f}")] \
                    if times else ["-", "-"]
            rows.append(row)
    speeds = ["; ".join([label_of(result), result["run"]]) + ": reads at "
              + pair(result["bandwidth"], "{:.0f}") + " GB/s, dense GEMM "
              + pair(result["ceiling"], "{:.0f}") + " TF" for result in results]
    return "Forward in graphs, µs.\n\n" + table(header, rows) + "\n\n" + "\n".join(speeds)


TABLES = {"bits": bits_table, "compare": compare_tables, "skew": skew_table,
          "small": small_table}


def heading(run):
    """Returns a line on one run: when, on what and how it was made."""
    return (f"{run['run']}: {run['date']}, {run['gpu']}, torch {run['torch']}; bf16, routing "
            f"given, {run['options']['kernels']} kernels; cool / hot, medians")


def merged(runs):
    """Returns the parts of several runs, each a list of results."""
    return {part: [result for run in runs for result in run.get(part, [])] for part in PARTS}


def report(runs):
    parts = merged(runs)
    return "\n\n".join(["\n".join(heading(run) for run in runs),
                        *[TABLES[part](parts[part]) for part in PARTS if parts[part]]])


def load_runs(paths):
    return [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in paths]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(report(load_runs(sys.argv[1:])))


if __name__ == "__main__":
    main()
