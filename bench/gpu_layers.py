# SPDX-License-Identifier: Apache-2.0
"""Switchyard's layer, the inputs of all layers, and checks that their results agree."""
import copy
import ctypes
import dataclasses
import sys

import torch
import torch.nn.functional as F

from gpu_torch_layers import FORMS, TorchLayer

TOLERANCE = 2e-2  # both sides round to bf16 at several places
TILE_TOLERANCE = 6e-2  # per kernel tile: one bad tile among thousands is lost in the whole
TILE = (128, 256)


class Weights:
    """Random experts: gate_up [E, 2I, H] and down [E, H, I], and with biases gate_up_bias [E, 2I]
    and down_bias [E, H]."""

    def __init__(self, shape, form="swiglu", device="cuda"):
        _, h, i, e, _ = shape

        def numbers(*sizes):
            return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

        self.form = FORMS[form]
        self.gate_up = numbers(e, 2 * i, h) * h**-0.5
        self.down = numbers(e, h, i) * i**-0.5
        self.gate_up_bias = numbers(e, 2 * i) * 0.5 if self.form.biases else None
        self.down_bias = numbers(e, h) * 0.5 if self.form.biases else None

    def tensors(self):
        """Returns the tensors that there are, by name."""
        names = ["gate_up", "down"] + ["gate_up_bias", "down_bias"] * self.form.biases
        return {name: getattr(self, name) for name in names}

    def of(self, experts):
        """Returns a copy of some experts."""
        some = copy.copy(self)
        for name, tensor in self.tensors().items():
            setattr(some, name, tensor[experts])
        return some


class Batch:
    """Tokens, their routing, and the gradient of the layer's output."""

    def __init__(self, shape, ids):
        t, h, _, e, k = shape
        self.shape = shape
        self.x = torch.randn(t, h, device=ids.device, dtype=torch.bfloat16)
        self.d_y = torch.randn(t, h, device=ids.device, dtype=torch.bfloat16)
        self.ids = ids
        self.ids32 = ids.to(torch.int32).contiguous()
        self.weights = torch.softmax(torch.randn(t, k, device=ids.device), -1).contiguous()
        self.rows = torch.bincount(ids.view(-1), minlength=e)  # [E]


def route(shape, exponent=0.0, experts=None, device="cuda"):
    """Draws K distinct experts for each token, [T, K] i64. Taking the K largest log-probabilities
    plus Gumbel noise samples without replacement. Experts are ranked in random order; the one of
    rank r has a probability proportional to 1 / r^exponent. With `experts`, all others have
    none."""
    t, _, _, e, k = shape
    ranks = torch.randperm(e, device=device).float() + 1
    logits = -exponent * ranks.log()
    if experts is not None:
        others = torch.ones(e, dtype=torch.bool, device=device)
        others[experts] = False
        logits = logits.masked_fill(others, -torch.inf)
    gumbel = -torch.empty(t, e, device=device).exponential_().log()
    return torch.topk(logits + gumbel, k).indices


def structure(kind, names):
    class Fields(ctypes.Structure):
        _fields_ = [(name, kind) for name in names.split()]

    return Fields


# These match the structs in gpu_compare.cpp.
Sizes = structure(ctypes.c_int64,
                  "num_tokens hidden intermediate num_experts top_k alignment portable form "
                  "is_exact makes_rows")
Tensors = structure(ctypes.c_void_p,
                    "x ids weights gate_up down y d_y d_x d_weights d_gate_up d_down "
                    "gate_up_bias down_bias d_gate_up_bias d_down_bias")
Numbers = structure(ctypes.c_int64,
                    "host_syncs bytes_held saved_activations saved_integers")


def load_library(path):
    library = ctypes.CDLL(path)
    layer, tensors = ctypes.c_void_p, ctypes.POINTER(Tensors)
    library.switchyard_make.restype = layer
    for name, arguments in {
            "make": [ctypes.POINTER(Sizes), ctypes.c_void_p], "free": [layer],
            "numbers": [layer, ctypes.POINTER(Numbers)],
            "forward": [layer, tensors, ctypes.c_int], "backward": [layer, tensors],
            "capture": [layer, tensors, ctypes.c_int], "replay": [layer]}.items():
        getattr(library, f"switchyard_{name}").argtypes = arguments
    return library


def nans_like(tensor):
    return torch.full_like(tensor, torch.nan)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a layer places its rows, which changes no bit of its results."""
    alignment: int = 1  # of each expert's rows
    is_exact: bool = False  # sizing; otherwise bounded
    makes_rows: bool = False  # otherwise experts read tokens if they can

    def __str__(self):
        return (f"{'exact' if self.is_exact else 'bounded'} sizing, alignment {self.alignment}, "
                f"{'rows' if self.makes_rows else 'tokens'}")


class Switchyard:
    """The same layer through the library's C functions, on torch's current stream."""

    def __init__(self, library, weights, batch, options, training=True, way=None):
        t, h, i, e, k = batch.shape
        way = way or Way(options.alignment)
        self.library = library
        # The default stream is 1 for CUDA and 0 for torch.
        stream = torch.cuda.current_stream().cuda_stream or 1
        self.layer = library.switchyard_make(
            ctypes.byref(Sizes(t, h, i, e, k, way.alignment, options.kernels == "portable",
                               weights.form.code, way.is_exact, way.makes_rows)), stream)
        if not self.layer:
            sys.exit("switchyard_make failed")
        self.y = nans_like(batch.x)
        given = {"x": batch.x, "ids": batch.ids32, "weights": batch.weights, "y": self.y,
                 **weights.tensors()}
        if training:
            self.d_x = nans_like(batch.x)
            self.d_weights = nans_like(batch.weights)
            self.gradients = {f"d_{name}": nans_like(tensor)
                              for name, tensor in weights.tensors().items()}
            given |= {"d_y": batch.d_y, "d_x": self.d_x, "d_weights": self.d_weights,
                      **self.gradients}
        assert all(tensor.is_contiguous() for tensor in given.values())
        self.given = given  # keeps the tensors alive
        self.tensors = Tensors(**{name: tensor.data_ptr() for name, tensor in given.items()})
        self.arguments = ctypes.byref(self.tensors)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.library.switchyard_free(self.layer)

    def call(self, function, *arguments):
        if function(self.layer, *arguments) != 0:
            sys.exit("a call of switchyard failed")

    def forward(self):
        self.call(self.library.switchyard_forward, self.arguments, 0)

    def training_forward(self):
        self.call(self.library.switchyard_forward, self.arguments, 1)

    def backward(self):
        self.call(self.library.switchyard_backward, self.arguments)

    def step(self):
        self.training_forward()
        self.backward()

    def capture_forward(self):
        self.forward()  # so that its memory is allocated
        self.call(self.library.switchyard_capture, self.arguments, 0)

    def capture_step(self):
        """Captures a step. One must have run before."""
        self.call(self.library.switchyard_capture, self.arguments, 1)

    def replay(self):
        self.call(self.library.switchyard_replay)

    def results(self):
        """Waits for what a step writes, and returns it by name."""
        torch.cuda.synchronize()
        return {"y": self.y, "d_x": self.d_x, "d_weights": self.d_weights, **self.gradients}

    def forget_results(self):
        for tensor in self.results().values():
            tensor.fill_(torch.nan)

    def numbers(self):
        result = Numbers()
        self.call(self.library.switchyard_numbers, ctypes.byref(result))
        return result


def distance(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def tiles(tensor):
    """Returns the sums of squares over the tiles of each matrix."""
    matrices = tensor.double().square().reshape(-1, *tensor.shape[-2:])
    padded = F.pad(matrices, (0, -matrices.shape[2] % TILE[1], 0, -matrices.shape[1] % TILE[0]))
    cut = padded.view(padded.shape[0], padded.shape[1] // TILE[0], TILE[0], -1, TILE[1])
    return cut.sum((2, 4))


def worst_tile(ours, theirs):
    """Returns the relative error of the worst tile. A tile of small numbers is measured against an
    average one."""
    worst = 0.0
    # One matrix at a time, because the gradients of all experts in double are too large.
    mean = theirs.float().square().mean().item()
    several = theirs.dim() == 3
    for a, b in zip(ours if several else [ours], theirs if several else [theirs]):
        sizes = tiles(torch.ones_like(b))
        wrong = tiles(a.double() - b.double()) / torch.maximum(tiles(b), mean * sizes)
        if wrong.isnan().any():
            return float("nan")
        worst = max(worst, wrong.max().sqrt().item())
    return worst


def compare_results(name, pairs):
    """Exits with the errors if a result differs from torch's, as a whole or in one tile."""
    errors = {tensor: distance(*pair) for tensor, pair in pairs.items()}
    in_tiles = {tensor: worst_tile(*pair) for tensor, pair in pairs.items()}
    wrong = {tensor: error for tensor, error in errors.items() if not error <= TOLERANCE}
    wrong |= {f"a tile of {tensor}": error for tensor, error in in_tiles.items()
              if not error <= TILE_TOLERANCE}
    if wrong:
        sys.exit(f"{name}: the results differ from torch's: {wrong}")
    return errors | {f"worst tile of {tensor}": error for tensor, error in in_tiles.items()}


def halves(gradients, i):
    """Splits what Switchyard packs: the gradients of gate and up, and of their biases."""
    result = {}
    for name, gradient in gradients.items():
        if "gate_up" in name:
            result[name.replace("gate_up", "gate")] = gradient[:, :i]
            result[name.replace("gate_up", "up")] = gradient[:, i:]
        else:
            result[name] = gradient
    return result


def check_step(name, batch, module, ours):
    """Compares every result and gradient of a step with torch's, and exits with the errors if they
    differ. Gradients of experts without rows must be zero, whatever torch leaves there."""
    theirs = TorchLayer(module, batch)
    theirs.clear()
    y = theirs.run(theirs.x, theirs.weights, theirs.ids)
    y.backward(batch.d_y)
    ours.step()
    torch.cuda.synchronize()
    busy, empty = batch.rows > 0, batch.rows == 0
    pairs = {"y": (ours.y, y.detach()), "d_x": (ours.d_x, theirs.x.grad),
             "d_weights": (ours.d_weights, theirs.weights.grad)}
    expected = {f"d_{name}": parameter.grad for name, parameter in module.named_parameters()}
    for gradient, tensor in halves(ours.gradients, batch.shape[2]).items():
        pairs[gradient] = (tensor[busy], expected[gradient][busy])
    errors = compare_results(name, pairs)
    theirs.clear()
    for gradient in ours.gradients.values():
        if torch.count_nonzero(gradient[empty]).item() != 0:
            sys.exit(f"{name}: gradients of experts without rows are not zero")
    return errors


def check_forward(name, batch, module, ours):
    theirs = TorchLayer(module, batch).forward()
    ours.forward()
    torch.cuda.synchronize()
    return compare_results(name, {"y": (ours.y, theirs)})


def check_best(name, batch, module, best):
    """Checks that both of torch's layers are equivalent in results and gradients."""
    results = []
    for experts in (module, best):
        layer = TorchLayer(experts, batch)
        layer.clear()
        y = layer.run(layer.x, layer.weights, layer.ids)
        y.backward(batch.d_y)
        gradients = {f"d_{name}": parameter.grad for name, parameter in experts.named_parameters()}
        results.append({"y": y.detach(), "d_x": layer.x.grad, "d_weights": layer.weights.grad,
                        **halves(gradients, batch.shape[2])})
        layer.clear()
    busy = batch.rows > 0
    theirs, best_results = results
    pairs = {}
    for result, tensor in theirs.items():
        some = busy if result not in ("y", "d_x", "d_weights") else slice(None)
        pairs[result] = (best_results[result][some], tensor[some])
    return compare_results(f"{name}, torch's own two", pairs)
