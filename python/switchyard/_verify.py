# SPDX-License-Identifier: Apache-2.0
"""Compares the layer with cases recorded by other systems (tests/data/golden/README.md)."""
from __future__ import annotations

import json
import pathlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ._activations import Activation
from ._checkpoint import Checkpoint, Path
from ._device import Device
from ._layer import LayerGradients, MoeLayer, MoeWeights, SavedForBackward
from ._library import InvalidArgument
from ._ranks import Communicator, run_ranks
from ._router import RouterForm

_EQUAL, _NEAR, _NEAR_SMALL, _NEAR_OR_NOISE = range(4)
_TOLERANCES = {_EQUAL: 0.0, _NEAR: 1e-5, _NEAR_SMALL: 1e-4, _NEAR_OR_NOISE: 1e-5}
_NOISE = 1e-6  # relative to ‖dx‖₂
_Pair = Tuple[np.ndarray, np.ndarray, int]  # ours, recorded, and the rule
_Pairs = Dict[str, _Pair]


class Comparison(NamedTuple):
    """The comparison of one tensor with the recorded one."""
    case: str
    num_ranks: int
    rank: Optional[int]  # None if the case was not recorded by rank
    tensor: str
    error: float  # ‖ours − recorded‖₂; for expert ids, the number that differ
    allowed: float

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.allowed)  # False for NaN


def verify(path: Path, *, ranks: Sequence[int] = (1, 4), threads: int = 1) -> List[Comparison]:
    """Recomputes the recorded cases of a folder or a single file, and compares all tensors.

    Cases from KempnerForge run with the number of ranks they were recorded with, those from
    Transformers with each of `ranks`. The layer computes on a CPU.
    """
    path = pathlib.Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument(f"there are no recorded cases in {path}")
    device = Device("cpu", threads=threads)
    comparisons = []
    for file in files:
        with Checkpoint(file) as recorded:
            case = _case_of(recorded, file.stem, device)
            for num_ranks in case.all_ranks or ranks:
                comparisons += case.run(num_ranks)
    return comparisons


def _case_of(recorded: Checkpoint, name: str, device: Device) -> "_Case":
    peer = recorded.metadata.get("peer", "")
    if peer.startswith("KempnerForge"):
        return _KempnerForge(recorded, name, device)
    if peer == "transformers":
        return _HuggingFace(recorded, name, device)
    raise InvalidArgument(f"{recorded.path} is not a recorded case: its peer {peer!r} is unknown")


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(values, np.float64).ravel()))


def _transposed(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.swapaxes(values, -1, -2))


class _Case:
    """A recorded layer: its options, its weights, and the tensors to compare."""

    all_ranks: Tuple[int, ...] = ()  # numbers of ranks it was recorded with; empty: any

    def __init__(self, recorded: Checkpoint, name: str, device: Device):
        self.read = recorded.read
        self.names = set(recorded)
        self.metadata = recorded.metadata
        self.name = name
        self.device = device
        self.options: Dict[str, Any] = {}
        self.weights = MoeWeights()  # weights of all experts

    def run(self, num_ranks: int) -> List[Comparison]:
        raise NotImplementedError

    def step(self, comm: Communicator, x: np.ndarray, d_y: np.ndarray
             ) -> Tuple[MoeLayer, np.ndarray, Callable[[], LayerGradients], SavedForBackward]:
        layer = MoeLayer(comm, device=self.device, **self.options)
        own = layer.placement.experts_of(comm.rank)
        weights = MoeWeights(**vars(self.weights))
        weights.gate_up, weights.down = self.weights.gate_up[own], self.weights.down[own]
        y, saved = layer.forward_training(weights, x)
        return layer, y, lambda: layer.backward(weights, saved, d_y), saved

    def compare(self, pairs: _Pairs, num_ranks: int, rank: Optional[int]) -> List[Comparison]:
        noise = _NOISE * _norm(pairs["dx"][1])
        result = []
        for tensor, (ours, recorded, rule) in pairs.items():
            if ours.shape != recorded.shape:
                raise InvalidArgument(f"{self.name}: {tensor} is recorded as "
                                      f"{list(recorded.shape)}, but ours is {list(ours.shape)}")
            size = _norm(recorded)
            allowed = _TOLERANCES[rule] * size
            if rule == _NEAR_OR_NOISE or (rule != _EQUAL and size == 0.0):
                allowed = max(allowed, noise)
            error = (float(np.count_nonzero(ours != recorded)) if rule == _EQUAL
                     else _norm(ours.astype(np.float64) - recorded))
            result.append(Comparison(self.name, num_ranks, rank, tensor, error, allowed))
        return result


class _KempnerForge(_Case):
    def __init__(self, recorded: Checkpoint, name: str, device: Device):
        super().__init__(recorded, name, device)
        case = json.loads(self.metadata["case"])
        self.is_sigmoid = case["router"] == "sigmoid_topk"
        preset = "kempner_forge_sigmoid" if self.is_sigmoid else "kempner_forge_softmax"
        activation = {"silu": Activation.SWIGLU, "gelu": Activation.GELU,
                      "relu": Activation.RELU}[case["activation"]]
        self.all_ranks = (case["ep"],)
        self.aux_weight = case["seq_aux"] if self.is_sigmoid else 1.0
        self.options = dict(
            hidden=case["dim"], intermediate=case["hidden"],
            router=RouterForm.preset(preset, case["experts"], case["top_k"]),
            activation=activation, shared_intermediate=case["hidden"] if case["shared"] else 0,
            capacity_factor=float(case["capacity"]),
            gradient_scale="rank" if case["gradient_scale"] else "off", balance_loss=True,
            z_loss=True, loss_scope="rank")
        self.has_gate = activation.has_gate
        self.weights = self._read_weights()

    def _read_weights(self) -> MoeWeights:
        read = self.read
        ups = [_transposed(read(f"weight.{name}")) for name in self._up_names()]
        weights = MoeWeights(gate=read("weight.router.gate.weight"),
                             gate_up=np.concatenate(ups, axis=1),
                             down=_transposed(read("weight.down_w")))
        # The gradient of a bias on the logits is that of a gate bias, so one of zeros stands in.
        if self.is_sigmoid:
            weights.score_bias = read("weight.router.expert_bias")
            weights.gate_bias = np.zeros_like(weights.score_bias)
        if self.options["shared_intermediate"]:
            stem = "weight.shared_expert."
            weights.shared_gate_up = np.concatenate([read(f"{stem}gate_proj.weight"),
                                                     read(f"{stem}up_proj.weight")])
            weights.shared_down = read(f"{stem}down_proj.weight")
        return weights

    def _up_names(self) -> List[str]:
        return ["gate_w", "up_w"] if self.has_gate else ["up_w"]

    def run(self, num_ranks: int) -> List[Comparison]:
        results = run_ranks(num_ranks, self._run_rank)
        return [comparison for rank, pairs in enumerate(results)
                for comparison in self.compare(pairs, num_ranks, rank)]

    def _run_rank(self, comm: Communicator) -> _Pairs:
        def recorded(name: str) -> np.ndarray:
            return self.read(f"rank{comm.rank}.{name}")

        x = recorded("x")
        layer, y, backward, saved = self.step(comm, x, recorded("dy"))
        ids, picks = saved.routing()
        losses = saved.losses()
        gradients = backward()
        pairs = {"expert_ids": (ids, recorded("expert_ids"), _EQUAL),
                 "routing_weights": (picks, recorded("routing_weights"), _NEAR),
                 "y": (y, recorded("y"), _NEAR), "dx": (gradients.d_x, recorded("dx"), _NEAR)}
        if len(x) > 0:  # without tokens KempnerForge divides by zero
            pairs["aux_loss"] = (np.float32([self.aux_weight * losses["balance"]]),
                                 recorded("aux_loss"), _NEAR)
            pairs["z_loss"] = (np.float32([losses["z"]]), recorded("z_loss"), _NEAR)
        self._add_gradients(pairs, gradients.weights, recorded)
        self._add_statistics(pairs, layer, comm.rank, recorded)
        return pairs

    def _add_gradients(self, pairs: _Pairs, ours: MoeWeights,
                       recorded: Callable[[str], np.ndarray]) -> None:
        parts = np.split(ours.gate_up, len(self._up_names()), axis=1)
        for name, part in (*zip(self._up_names(), parts), ("down_w", ours.down)):
            pairs[f"d.{name}"] = (_transposed(part), recorded(f"d.{name}"), _NEAR)
        name = "d.router.gate.weight"
        pairs[name] = (ours.gate, recorded(name), _NEAR_OR_NOISE)
        if self.is_sigmoid:
            name = "d.router.expert_bias"
            pairs[name] = (ours.gate_bias, recorded(name), _NEAR_OR_NOISE)
        if ours.shared_down is not None:
            gate, up = np.split(ours.shared_gate_up, 2)
            for name, part in (("gate", gate), ("up", up), ("down", ours.shared_down)):
                name = f"d.shared_expert.{name}_proj.weight"
                pairs[name] = (part, recorded(name), _NEAR)

    def _add_statistics(self, pairs: _Pairs, layer: MoeLayer, rank: int,
                        recorded: Callable[[str], np.ndarray]) -> None:
        picks = layer.pick_counts().picks
        pairs["expert_counts"] = (picks.astype(np.float32), recorded("expert_counts"), _NEAR)
        if f"rank{rank}.expert_bias_after" not in self.names:
            return
        mean = np.full(len(picks), 1.0 / len(picks), np.float32)
        average, bias = mean.copy(), np.zeros_like(mean)
        if picks.sum() > 0:
            average = np.float32(0.99) * mean + np.float32(0.01) * (picks / picks.sum())
            bias = np.float32(1e-3) * (mean - average)
        pairs["expert_bias_after"] = (bias, recorded("expert_bias_after"), _NEAR_SMALL)
        pairs["expert_ema_after"] = (average, recorded("expert_ema_after"), _NEAR)


class _HuggingFace(_Case):
    def __init__(self, recorded: Checkpoint, name: str, device: Device):
        super().__init__(recorded, name, device)
        config = json.loads(self.metadata["config"])
        intermediate = config.get("moe_intermediate_size", config.get("intermediate_size"))
        self.options = dict(hidden=config["hidden_size"], intermediate=intermediate,
                            router=self._router(config))
        self.weights = self._read("weight.")
        if self.metadata["class"] == "DeepseekV3MoE":
            self.weights.score_bias = self.read("buffer.gate.e_score_correction_bias")
            self.options["shared_intermediate"] = config["n_shared_experts"] * intermediate

    def _router(self, config: Dict[str, Any]) -> RouterForm:
        experts = next(config[key] for key in ("num_experts", "num_local_experts",
                                               "n_routed_experts") if key in config)
        top_k = config["num_experts_per_tok"]
        normalise = config.get("norm_topk_prob", True)
        if self.metadata["class"] != "DeepseekV3MoE":
            return RouterForm(experts, top_k, normalise=normalise)
        return RouterForm(experts, top_k, "sigmoid", "choice", normalise,
                          config["routed_scaling_factor"], config["n_group"],
                          config["topk_group"])

    def _read(self, prefix: str) -> MoeWeights:
        weights = MoeWeights(self.read(f"{prefix}gate.weight"),
                             self.read(f"{prefix}experts.gate_up_proj"),
                             self.read(f"{prefix}experts.down_proj"))
        stem = f"{prefix}shared_experts."
        if f"{stem}down_proj.weight" in self.names:
            weights.shared_gate_up = np.concatenate([self.read(f"{stem}gate_proj.weight"),
                                                     self.read(f"{stem}up_proj.weight")])
            weights.shared_down = self.read(f"{stem}down_proj.weight")
        return weights

    def run(self, num_ranks: int) -> List[Comparison]:
        """With several ranks, rank 0 has no tokens, and higher ranks have more than lower ones."""
        x, d_y = self.read("x"), self.read("dy")
        most = max(num_ranks * (num_ranks - 1), 1)
        offsets = [len(x) * r * (r - 1) // most for r in range(num_ranks + 1)]
        if num_ranks == 1:
            offsets = [0, len(x)]

        def run_rank(comm: Communicator):
            tokens = slice(*offsets[comm.rank:comm.rank + 2])
            _, y, backward, _ = self.step(comm, x[tokens], d_y[tokens])
            gradients = backward()
            ours = gradients.weights
            shared = [None if part is None else comm.all_reduce(part)
                      for part in (ours.gate, ours.shared_gate_up, ours.shared_down)]
            return y, gradients.d_x, ours.gate_up, ours.down, shared

        parts = run_ranks(num_ranks, run_rank)
        y, d_x, gate_up, down = (np.concatenate([part[i] for part in parts]) for i in range(4))
        gate, shared_gate_up, shared_down = parts[0][4]
        recorded = self._read("d.")
        pairs = {"y": (y, self.read("y"), _NEAR), "dx": (d_x, self.read("dx"), _NEAR),
                 "d.gate_up": (gate_up, recorded.gate_up, _NEAR),
                 "d.down": (down, recorded.down, _NEAR),
                 "d.gate": (gate, recorded.gate, _NEAR_OR_NOISE)}
        if shared_down is not None:
            pairs["d.shared_gate_up"] = (shared_gate_up, recorded.shared_gate_up, _NEAR)
            pairs["d.shared_down"] = (shared_down, recorded.shared_down, _NEAR)
        return self.compare(pairs, num_ranks, None)
