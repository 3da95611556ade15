"""The layers that are compared, Switchyard's and torch's, their inputs, and whether they agree."""
import ctypes
import sys

import torch
import torch.nn.functional as F

TOLERANCE = 2e-2  # both sides round to bf16 at several places


class Weights:
    """Random experts: gate_up [E, 2I, H] and down [E, H, I]."""

    def __init__(self, shape):
        _, h, i, e, _ = shape
        self.gate_up = torch.randn(e, 2 * i, h, device="cuda", dtype=torch.bfloat16) * h**-0.5
        self.down = torch.randn(e, h, i, device="cuda", dtype=torch.bfloat16) * i**-0.5

    def of(self, experts):
        """A copy of some experts."""
        some = Weights.__new__(Weights)
        some.gate_up, some.down = self.gate_up[experts], self.down[experts]
        return some


class Batch:
    """Tokens, the gradient of what becomes of them, and their routing."""

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
    """K distinct experts a token, [T, K] i64: drawn without replacement, which the largest of
    log-probabilities with Gumbel noise are. The expert of rank r, in random order, has probability
    1 / r^exponent; with `experts` all others have none."""
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
    """TorchTitan's algorithm over given picks."""

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


class TorchLayer:
    """TorchExperts, as they are or compiled, with a batch."""

    def __init__(self, experts, batch, compiled=False):
        if compiled:  # a code object has room for few compilations, and then silently runs eagerly
            torch.compiler.reset()
        self.experts = experts
        self.run = torch.compile(experts, dynamic=False) if compiled else experts
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
        """Of a step beyond what it is given and what it returns: y and the gradients."""
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


# As gpu_compare.cpp has them.
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
    """The same through the library's functions of C, on torch's current stream."""

    def __init__(self, library, weights, batch, options, training=True):
        t, h, i, e, k = batch.shape
        self.library = library
        # 1 is CUDA's name for the default stream, which torch calls 0.
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
        self.given = given  # which must live as long
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
        self.forward()  # so that its memory is there
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


def require_small(name, errors):
    wrong = {tensor: error for tensor, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        sys.exit(f"{name}: the results differ from torch's: {wrong}")
    return errors


def check_step(name, batch, module, ours):
    """Every result and gradient of a step against torch's; exits with the numbers if they differ.
    Gradients of experts without rows must be zero, whatever torch leaves there."""
    i = batch.shape[2]
    theirs = TorchLayer(module, batch)
    theirs.clear()
    y = theirs.run(theirs.x, theirs.weights, theirs.ids)
    y.backward(batch.d_y)
    ours.step()
    torch.cuda.synchronize()
    busy, empty = batch.rows > 0, batch.rows == 0
    errors = {
        "y": distance(ours.y, y.detach()),
        "d_x": distance(ours.d_x, theirs.x.grad),
        "d_weights": distance(ours.d_weights, theirs.weights.grad),
        "d_gate": distance(ours.d_gate_up[busy, :i], module.gate.grad[busy]),
        "d_up": distance(ours.d_gate_up[busy, i:], module.up.grad[busy]),
        "d_down": distance(ours.d_down[busy], module.down.grad[busy]),
    }
    theirs.clear()
    for gradient in (ours.d_gate_up, ours.d_down):
        if torch.count_nonzero(gradient[empty]).item() != 0:
            sys.exit(f"{name}: gradients of experts without rows are not zero")
    return require_small(name, errors)


def check_forward(name, batch, module, ours):
    theirs = TorchLayer(module, batch).forward()
    ours.forward()
    torch.cuda.synchronize()
    return require_small(name, {"y": distance(ours.y, theirs)})
