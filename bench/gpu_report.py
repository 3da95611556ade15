"""Turns the measurements of gpu_compare.py into floors, shares and tables. Needs no torch."""

SHAPES = {  # T, H, I, E, K
    "qwen3-30b": (16384, 2048, 768, 128, 8),
    "olmoe": (16384, 2048, 1024, 64, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "dsv3-slice": (4096, 7168, 2048, 32, 8),
}
OURS, COMPILED = "switchyard", "torch.compile"
BEST = "torch, best"  # the best that a user of torch can write
GRAPH = "torch, graph"
HEATS = ("cool", "hot")  # every time is a dict with these keys, in ms
BF16 = 2  # bytes


def forward_flops(shape):
    t, h, i, _, k = shape
    return 6 * t * k * h * i


def step_flops(shape):
    return 3 * forward_flops(shape)


def tflops(flops, times):
    return {heat: flops / times[heat] * 1e-9 for heat in HEATS}


def ratio(over, under):
    return {heat: over[heat] / under[heat] for heat in HEATS}


def percent(values, of):
    return {heat: 100 * values[heat] / of[heat] for heat in HEATS}


def percent_more(times, base):
    return {heat: 100 * (times[heat] / base[heat] - 1) for heat in HEATS}


def saved_bytes_wanted(shape):
    """Returns the bytes to save per token: its x, and the gate and up halves of its K hidden
    rows."""
    _, h, i, _, k = shape
    return BF16 * (h + 2 * k * i)


def forward_floor(shape, busy_experts, bytes_per_s, flops_per_s):
    """Returns the time in ms that no forward can beat, and what limits it. The weights of experts
    that have rows, x and y must move once, and the products must be computed. Launches are free
    here, and so are intermediate rows, which need not leave the chip."""
    t, h, i, _, _ = shape
    moved = BF16 * (busy_experts * 3 * h * i + 2 * t * h)
    memory, compute = moved / bytes_per_s * 1e3, forward_flops(shape) / flops_per_s * 1e3
    return max(memory, compute), "memory" if memory >= compute else "compute"


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


def name_of(result):
    return f"{result['shape']} {','.join(str(n) for n in result['sizes'])}"


def compare_tables(results):
    """Returns a table of times and one of memory, from the results of gpu_compare.compare."""
    times, memory = [], []
    for result in results:
        layers = result["layers"]
        for label, layer in layers.items():
            reached = tflops(step_flops(result["sizes"]), layer["step"])
            faster = [pair(ratio(layers[than]["step"], layer["step"]), "{:.2f}x")
                      if than in layers else "-" for than in (COMPILED, BEST)]
            times.append([name_of(result), label, pair(layer["ceiling"], "{:.0f}"),
                          pair(layer["forward"]), pair(layer["step"]), pair(reached, "{:.0f}"),
                          pair(percent(reached, layer["ceiling"]), "{:.0f}%"), *faster])
        memory.append([result["shape"],
                       *[f"{layer['peak_bytes'] / 2**20:.0f}" for layer in layers.values()],
                       f"{result['saved_activations']:.0f} + {result['saved_integers']:.0f}",
                       saved_bytes_wanted(result["sizes"]), result["host_syncs"]])
    labels = list(results[0]["layers"])
    return (table(["T, H, I, E, K", "layer", "dense GEMM, TF", "fwd, ms", "fwd+bwd, ms",
                   "fwd+bwd, TF", "of dense GEMM", f"faster than {COMPILED}",
                   f"than {BEST}"], times)
            + "\n\nPeak memory beyond weights, inputs, outputs and gradients, MiB; what forward "
            + "saves, bytes a token (activations + integers of the plan):\n\n"
            + table(["shape", *labels, "saved", "2H + 4KI", "host syncs"], memory))


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
            rows.append([result["shape"], name, f"{routing['fullest']:.1f}x", routing["empty"],
                         pair(step), pair(reached, "{:.0f}"), pair(routing["ceiling"], "{:.0f}"),
                         *[pair(percent_more(step, base), "{:+.1f}%") if base else ""
                           for base in bases]])
    return table(["shape", "routing", "fullest", "empty", "fwd+bwd, ms", "TF",
                  "dense GEMM, TF", "against balanced", "against the half alone"], rows)


def small_table(results):
    """Returns the times of forwards with few tokens beside their floors."""
    rows = []
    for result in results["batches"]:
        floor = result["floor"]
        row = [result["sizes"][0], result["busy_experts"], pair(floor, "{:.3f}"),
               result["bound"]]
        for label in ("eager", "graph"):
            row += [pair(result[label], "{:.3f}"),
                    pair(percent(floor, result[label]), "{:.0f}%")]
        row += [pair(result[than], "{:.3f}") if than in result else "-"
                for than in (COMPILED, GRAPH)]
        rows.append(row)
    _, h, i, e, k = results["batches"][0]["sizes"]
    return (f"Forward, H {h}, I {i}, {e} experts, {k} picks; reads at "
            f"{pair(results['bandwidth'], '{:.0f}')} GB/s, dense GEMM "
            f"{pair(results['ceiling'], '{:.0f}')} TF:\n\n"
            + table(["T", "experts with rows", "floor, ms", "bound by", "eager, ms", "of floor",
                     "graph, ms", "of floor", f"{COMPILED}, ms", f"{GRAPH}, ms"], rows))
