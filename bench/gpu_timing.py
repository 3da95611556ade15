# SPDX-License-Identifier: Apache-2.0
"""Times work on a GPU, cool and hot, and measures the GPU's own limits the same way."""
import math
import statistics
import time

import torch

from gpu_floors import HEATS, dense_sizes

BURSTS = 5  # per cool time
PAUSE_S = 0.15  # before each burst
WARM_UP_MS = 3  # until the clock has ramped up
BURST_MS = 20  # any longer is no longer cool; a single round may exceed it
LOAD_MS = 300  # of the same work before a hot time
CEILING_BURSTS = 3  # a ceiling varies less than a layer
SHORT_MS = 0.5  # between two events, so that recording them does not count


def timed(run, rounds):
    """Runs `rounds` times, and returns the events around the runs once all have completed."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return events


def times_ms(events):
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def cool_ms(run, rounds, agree=float, bursts=BURSTS):
    """Times short bursts, because a GPU under load for more than about 30 ms reaches its power
    limit and slows down.

    `agree` turns the numbers of all ranks into one, so that all of them run equally often."""
    estimate = agree(times_ms(timed(run, 2))[1])
    warm_ups = math.ceil(WARM_UP_MS / estimate)
    rounds = max(1, min(rounds, int(BURST_MS / estimate) - warm_ups))
    times = []
    for _ in range(bursts):
        time.sleep(PAUSE_S)
        for _ in range(warm_ups):
            run()
        times += times_ms(timed(run, rounds))
    return statistics.median(times)


def hot_ms(run, rounds, estimate_ms, agree=float):
    """Times runs directly after a load, with no host sync in between."""
    runs = math.ceil(1.1 * LOAD_MS / agree(estimate_ms))
    while True:
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(runs):
            run()
        events = timed(run, rounds)
        load_ms = agree(begin.elapsed_time(events[0]))
        if load_ms >= LOAD_MS:
            return statistics.median(times_ms(events))
        runs = math.ceil(1.2 * runs * LOAD_MS / load_ms)


def measure(run, rounds, agree=float, bursts=BURSTS):
    cool = cool_ms(run, rounds, agree, bursts)
    return {"cool": cool, "hot": hot_ms(run, rounds, cool, agree)}


def measure_short(run, rounds):
    """Measures work of microseconds, which runs several times between two events."""
    repeats = max(1, math.ceil(SHORT_MS / times_ms(timed(run, 10))[-1]))

    def several():
        for _ in range(repeats):
            run()

    return {heat: ms / repeats for heat, ms in measure(several, rounds).items()}


def dense_tflops(m, n, k, rounds):
    """Returns the speed of cuBLAS on [m, k] × [n, k]ᵀ."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    times = measure(lambda: torch.mm(a, b.t(), out=out), rounds, bursts=CEILING_BURSTS)
    return {heat: 2 * m * n * k / times[heat] * 1e-9 for heat in HEATS}


def dense_ceilings(shape, rounds):
    return {name: dense_tflops(*sizes, rounds) for name, sizes in dense_sizes(shape).items()}


def bandwidth_gb_s(rounds):
    """Returns the bandwidth of a sum over 4 GiB, of a copy of half of it, and the better of the
    two."""
    buffer = torch.empty(1 << 30, device="cuda").normal_()
    half = buffer.numel() // 2
    num_bytes = 4 * buffer.numel()  # the sum reads them; the copy reads and writes half each
    result = {}
    for name, run in {"read": lambda: torch.sum(buffer),
                      "copy": lambda: buffer[half:].copy_(buffer[:half])}.items():
        times = measure(run, rounds, bursts=CEILING_BURSTS)
        result[name] = {heat: num_bytes / times[heat] * 1e-6 for heat in HEATS}
    result["best"] = {heat: max(result["read"][heat], result["copy"][heat]) for heat in HEATS}
    return result
