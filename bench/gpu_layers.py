"""The layers to compare, Switchyard's and torch's, their inputs, and checks that they agree."""
import ctypes
import sys

import torch
import torch.nn.functional as F

TOLERANCE = 2e-2  # both sides round to bf16 at several places
TILE_TOLERANCE = 6e-2  # per kernel tile: one bad tile among thousands is lost in the whole
TILE = (128, 256)


class Weights:
    """Random experts: gate_up [E, 2I, H] and down [E, H, I]."""

    def __init__(self, shape):
        _, h, i, e, _ = shape
        self.gate_up = torch.randn(e, 2 * i, h, device="cuda", dtype=torch.bfloat16) * h**-0.5
        self.down = torch.randn(e, h, i, device="cuda", dtype=torch.bfloat16) * i**-0.5

    def of(self, experts):
        """Returns a copy of some experts."""
        some = Weights.__new__(Weights)
        some.gate_up, some.down = self.gate_up[experts], self.down[experts]
        return some


class Batch:
    """Tokens, their routing, and the gradient of the layer's output."""

    def __init__(self, shape, ids):
        t, h, _, e, k = shape
        self.shape = shape
        self.x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
        self.d_y = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
        self.ids = ids
        self.ids32 = ids.to(torch.int32).contiguous()
        self.weights = torch.softmax(torch.randn(t, k, device="cuda"), -1).contiguous()
        self.rows = torch.bincount(ids.view(-1), minlength=e)  # [E]


def route(shape, exponent=0.0, experts=None):
    """Draws K distinct experts for each token, [T, K] i64. Taking the K largest log-probabilities
    plus Gumbel noise samples without replacement. Experts are ranked in random order; the one of
    rank r has a probability proportional to 1 / r^exponent. With `experts`, all others have
    none."""
    t, _, _, e, k = shape
    ranks = torch.randperm(e, device="cuda").float() + 1
    logits = -exponent * ranks.log()
    if experts is not None:
        others = torch.ones(e, dtype=torch.bool, device="cuda")
        others[experts] = False
        logits = logits.masked_fill(others, -torch.inf)
    gumbel = -torch.empty(t, e, device="cuda").exponential_().log()
    return torch.topk(logits + gumbel, k).indices


class TorchExperts(torch.nn.Module):
    """TorchTitan's algorithm with given picks."""

    def __init__(self, weights, num_experts, top_k):
        super().__init__()
        i = weights.down.shape[-1]
        self.gate = torch.nn.Parameter(weights.gate_up[:, :i].contiguous())
        self.up = torch.nn.Parameter(weights.gate_up[:, i:].contiguous())
        self.down = torch.nn.Parameter(weights.down.clone())
        self.num_experts = num_experts
        self.top_k = top_k

    def forward(self, x, weights, ids):
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = order // self.top_k
        counts = torch.histc(ids.view(-1).float(), bins=self.num_experts, min=0,
                             max=self.num_experts)
        offsets = torch.cumsum(counts, 0).to(torch.int32)
        rows = x[tokens]
        hidden = F.silu(torch._grouped_mm(rows, self.gate.transpose(-2, -1), offs=offsets))
        hidden = hidden * torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=offsets)
        out = torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=offsets)
        out = (out.float() * weights.view(-1)[order][:, None]).to(x.dtype)
        index = tokens[:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_add_(0, index, out)


class Permuted(torch.autograd.Function):
    """Computes rows[order]. Its gradient is another permutation instead of a scatter-add."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, d_rows):
        inverse, = ctx.saved_tensors
        return d_rows[inverse], None, None


class RowsOfTokens(torch.autograd.Function):
    """Computes x[order // K]. Its gradient gathers each token's K rows and sums them."""

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, d_rows):
        inverse, = ctx.saved_tensors
        by_token = d_rows[inverse].view(-1, ctx.top_k, d_rows.shape[1])
        return by_token.float().sum(1).to(d_rows.dtype), None, None, None


class BestTorchExperts(torch.nn.Module):
    """The fastest that torch's own operators allow: gate and up in one product, and no
    scatter-add."""

    def __init__(self, weights, num_experts, top_k):
        super().__init__()
        self.gate_up = torch.nn.Parameter(weights.gate_up.clone())
        self.down = torch.nn.Parameter(weights.down.clone())
        self.num_experts = num_experts
        self.top_k = top_k

    def forward(self, x, weights, ids):
        order = torch.argsort(ids.view(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.histc(ids.view(-1).float(), bins=self.num_experts, min=0,
                             max=self.num_experts)
        offsets = torch.cumsum(counts, 0).to(torch.int32)
        rows = RowsOfTokens.apply(x, order, inverse, self.top_k)
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1),
                                     offs=offsets).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=offsets)
        by_token = Permuted.apply(out, inverse, order).view(-1, self.top_k, x.shape[1])
        return (by_token.float() * weights[:, :, None]).sum(1).to(x.dtype)


class TorchLayer:
    """Torch's experts with a batch, eager or compiled in a mode of torch.compile."""

    def __init__(self, experts, batch, mode=None):
        # A code object allows only a few compilations, then silently runs eagerly.
        if mode:
            torch.compiler.reset()
        self.experts = experts
        self.run = torch.compile(experts, dynamic=False, mode=mode) if mode else experts
        self.x = batch.x.clone().requires_grad_()
        self.weights = batch.weights.clone().requires_grad_()
        self.ids, self.d_y = batch.ids, batch.d_y

    def forward(self):
        with torch.no_grad():
            return self.run(self.x, self.weights, self.ids)

    def step(self):
        self.clear()
        self.run(self.x, self.weights, self.ids).backward(self.d_y)

    def leaves(self):
        return [self.x, self.weights, *self.experts.parameters()]

    def clear(self):
        for leaf in self.leaves():
            leaf.grad = None

    def peak_bytes(self):
        """Returns the peak memory of a step beyond its inputs and its results, y and the
        gradients."""
        self.step()
        self.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        returned = [self.x, *self.leaves()]  # y is as large as x
        return (torch.cuda.max_memory_allocated() - before
                - sum(t.numel() * t.element_size() for t in returned))


def structure(kind, names):
    class Fields(ctypes.Structure):
        _fields_ = [(name, kind) for name in names.split()]

    return Fields


# These match the structs in gpu_compare.cpp.
Sizes = structure(ctypes.c_int64,
                  "num_tokens hidden intermediate num_experts top_k alignment portable")
Tensors = structure(ctypes.c_void_p,
                    "x ids weights gate_up down y d_y d_x d_weights d_gate_up d_down")
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


class Switchyard:
    """The same layer through the library's C functions, on torch's current stream."""

    def __init__(self, library, weights, batch, options, training=True):
        t, h, i, e, k = batch.shape
        self.library = library
        # The default stream is 1 for CUDA and 0 for torch.
        stream = torch.cuda.current_stream().cuda_stream or 1
        self.layer = library.switchyard_make(
            ctypes.byref(Sizes(t, h, i, e, k, options.alignment, options.kernels == "portable")),
            stream)
        if not self.layer:
            sys.exit("switchyard_make failed")
        self.y = nans_like(batch.x)
        given = {"x": batch.x, "ids": batch.ids32, "weights": batch.weights, "y": self.y,
                 "gate_up": weights.gate_up, "down": weights.down}
        if training:
            self.d_x = nans_like(batch.x)
            self.d_weights = nans_like(batch.weights)
            self.d_gate_up = nans_like(weights.gate_up)
            self.d_down = nans_like(weights.down)
            given |= {"d_y": batch.d_y, "d_x": self.d_x, "d_weights": self.d_weights,
                      "d_gate_up": self.d_gate_up, "d_down": self.d_down}
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

    def replay(self):
        self.call(self.library.switchyard_replay)

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


def check_step(name, batch, module, ours):
    """Compares every result and gradient of a step with torch's, and exits with the errors if they
    differ. Gradients of experts without rows must be zero, whatever torch leaves there."""
    i = batch.shape[2]
    theirs = TorchLayer(module, batch)
    theirs.clear()
    y = theirs.run(theirs.x, theirs.weights, theirs.ids)
    y.backward(batch.d_y)
    ours.step()
    torch.cuda.synchronize()
    busy, empty = batch.rows > 0, batch.rows == 0
    errors = compare_results(name, {
        "y": (ours.y, y.detach()),
        "d_x": (ours.d_x, theirs.x.grad),
        "d_weights": (ours.d_weights, theirs.weights.grad),
        "d_gate": (ours.d_gate_up[busy, :i], module.gate.grad[busy]),
        "d_up": (ours.d_gate_up[busy, i:], module.up.grad[busy]),
        "d_down": (ours.d_down[busy], module.down.grad[busy]),
    })
    theirs.clear()
    for gradient in (ours.d_gate_up, ours.d_down):
        if torch.count_nonzero(gradient[empty]).item() != 0:
            sys.exit(f"{name}: gradients of experts without rows are not zero")
    return errors


def check_forward(name, batch, module, ours):
    theirs = TorchLayer(module, batch).forward()
    ours.forward()
    torch.cuda.synchronize()
    return compare_results(name, {"y": (ours.y, theirs)})


def check_best(name, batch, module, best):
    """Checks that both of torch's layers are equivalent in results and gradients of the inputs."""
    results = []
    for experts in (module, best):
        layer = TorchLayer(experts, batch)
        y = layer.run(layer.x, layer.weights, layer.ids)
        y.backward(batch.d_y)
        results.append((y.detach(), layer.x.grad, layer.weights.grad))
        layer.clear()
    compare_results(f"{name}, torch's own two", dict(zip(("y", "d_x", "d_weights"),
                                                         zip(*results))))
