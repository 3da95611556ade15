"""Times of work on a GPU, cool and hot, and what the GPU itself can do, timed the same way."""
import math
import statistics
import time

import torch

from gpu_report import HEATS

BURSTS = 5  # of cool times
PAUSE_S = 0.15  # before each
WARM_UP_MS = 3  # until its clock is up
BURST_MS = 20  # after which it would not be cool any more, unless one round takes longer
LOAD_MS = 300  # of the same work before a hot time


def timed(run, rounds):
    """Events around `rounds` runs, all of which have come by."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return events


def times_ms(events):
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def cool_ms(run, rounds, agree=float):
    """A GPU under load for more than some 30 ms draws all the power that it may, and slows down.

    `agree` makes one number of those that ranks have, so that all of them run equally often."""
    estimate = agree(times_ms(timed(run, 2))[1])
    warm_ups = math.ceil(WARM_UP_MS / estimate)
    rounds = max(1, min(rounds, int(BURST_MS / estimate) - warm_ups))
    times = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        for _ in range(warm_ups):
            run()
        times += times_ms(timed(run, rounds))
    return statistics.median(times)


def hot_ms(run, rounds, estimate_ms, agree=float):
    """The host is never waited for between the load and the rounds."""
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


def measure(run, rounds, agree=float):
    cool = cool_ms(run, rounds, agree)
    return {"cool": cool, "hot": hot_ms(run, rounds, cool, agree)}


class DenseGemm:
    """cuBLAS on as many rows as the experts of a shape have: [T·K, H] × [2I, H]ᵀ."""

    def __init__(self, shape):
        t, h, i, _, k = shape
        self.a = torch.randn(t * k, h, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(2 * i, h, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(t * k, 2 * i, device="cuda", dtype=torch.bfloat16)
        self.flops = 2 * t * k * h * 2 * i

    def tflops(self, rounds):
        times = measure(lambda: torch.mm(self.a, self.b.t(), out=self.out), rounds)
        return {heat: self.flops / times[heat] * 1e-9 for heat in HEATS}


def bandwidth_gb_s(rounds):
    """Of a sum over 4 GiB and of a copy of half of them, and the better of both."""
    buffer = torch.empty(1 << 30, device="cuda").normal_()
    half = buffer.numel() // 2
    num_bytes = 4 * buffer.numel()  # read by the sum; read and written by the copy
    read = measure(lambda: torch.sum(buffer), rounds)
    copy = measure(lambda: buffer[half:].copy_(buffer[:half]), rounds)
    result = {name: {heat: num_bytes / times[heat] * 1e-6 for heat in HEATS}
              for name, times in (("read", read), ("copy", copy))}
    result["best"] = {heat: max(result["read"][heat], result["copy"][heat]) for heat in HEATS}
    return result
