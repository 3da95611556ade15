# SPDX-License-Identifier: Apache-2.0
"""Finds every experts class of transformers and builds a tiny module of each.

An experts class is one that transformers decorates with `use_experts_implementation`. Its parameters hold all experts
of a layer, and its config names the implementation that runs.
"""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.integrations.moe import _default_apply_gate

_DECORATED_CLASS = re.compile(r"^@use_experts_implementation\b[^\n]*\n(?:@[^\n]*\n)*class (\w+)", re.MULTILINE)
_DECORATOR = re.compile(r"^@use_experts_implementation\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    experts: int


# Rows of these sizes are multiples of 16 bytes in float32 and of nothing larger.
TINY = Sizes(hidden=36, intermediate=20, experts=7)
# Rows of these sizes are multiples of 4 bytes only.
ODD = Sizes(hidden=33, intermediate=21, experts=5)

# Each class reads its sizes from some of these attributes of its config.
_HIDDEN = ("hidden_size", "moe_hidden_size")
_INTERMEDIATE = ("intermediate_size", "moe_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The default limits of 7 and 10 would clamp nothing here. An alpha that no model uses shows who hard-codes 1.702.
_GATE = {"swiglu_limit": 1.25, "swiglu_alpha": 1.3}


@dataclasses.dataclass(frozen=True)
class Family:
    """One experts class, or a variant of it that some config options select."""

    folder: str
    class_name: str
    options: tuple = ()

    @property
    def name(self):
        return " ".join([self.folder, *(f"{option}={value}" for option, value in self.options)])

    @property
    def label(self):
        """A name that no other family has, for the ids of tests."""
        return " ".join([self.class_name, *self.name.split(" ")[1:]])

    @property
    def experts_class(self):
        return getattr(self._modeling, self.class_name)

    @property
    def _modeling(self):
        return importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")

    @property
    def reads(self):
        """The names of all config attributes that the class's __init__ reads."""
        source = inspect.getsource(inspect.unwrap(self.experts_class.__init__))
        return sorted(set(re.findall(r"\bconfig\.(\w+)", source)))

    @property
    def config_class(self):
        """The config class that has every attribute the experts read and whose name resembles theirs most.

        An annotation does not decide: Qwen3OmniMoeThinkerTextExperts names a config that it never gets.
        """
        module = importlib.import_module(f"transformers.models.{self.folder}.configuration_{self.folder}")
        candidates = [
            c
            for c in vars(module).values()
            if inspect.isclass(c) and issubclass(c, PreTrainedConfig) and c.__module__ == module.__name__
        ]
        reads = self.reads
        for candidate in sorted(candidates, key=lambda c: _resemblance(c.__name__, self.class_name), reverse=True):
            defaults = candidate()
            if all(hasattr(defaults, attribute) for attribute in reads):
                return candidate
        raise LookupError(f"no config of {module.__name__} has all of {reads}, which {self.class_name} reads")

    def build(self, sizes=TINY, seed=1):
        """Builds the module with sizes of its own and random parameters."""
        reads = self.reads
        arguments = {}
        overrides = dict(self.options)
        # Ernie's config lists one intermediate size for each modality, and each module gets its own as an argument.
        takes_intermediate = "intermediate_size" in inspect.signature(self.experts_class.__init__).parameters
        if takes_intermediate:
            arguments["intermediate_size"] = sizes.intermediate
        else:
            overrides.update({a: sizes.intermediate for a in _INTERMEDIATE if a in reads})
        overrides.update({a: sizes.hidden for a in _HIDDEN if a in reads})
        overrides.update({a: sizes.experts for a in _EXPERTS if a in reads})
        overrides.update({a: value for a, value in _GATE.items() if a in reads})

        config = self.config_class()
        for attribute, value in overrides.items():
            setattr(config, attribute, value)
        experts = self.experts_class(config, **arguments)
        randomise(experts, seed)

        if experts.num_experts != sizes.experts:
            raise ValueError(f"{self.class_name} has {experts.num_experts} experts instead of {sizes.experts}")
        if max(p.numel() for p in experts.parameters()) > 3 * sizes.experts * sizes.hidden * sizes.intermediate:
            raise ValueError(f"{self.class_name} is not tiny; it reads its sizes from some of {reads}")
        return experts


# These options change what an experts module computes, and its class alone does not show them.
_VARIANTS = [
    # The experts of Nemotron 3 work in a latent space that is narrower than the model.
    Family("nemotron_h", "NemotronHExperts", (("moe_latent_size", 28),)),
    # Fine-tuned and small models replace the default activation.
    Family("mixtral", "MixtralExperts", (("hidden_act", "swish"),)),
    Family("mixtral", "MixtralExperts", (("hidden_act", "gelu"),)),
    Family("mixtral", "MixtralExperts", (("hidden_act", "gelu_pytorch_tanh"),)),
    Family("mixtral", "MixtralExperts", (("hidden_act", "relu"),)),
    Family("mixtral", "MixtralExperts", (("hidden_act", "tanh"),)),
    Family("nemotron_h", "NemotronHExperts", (("mlp_hidden_act", "silu"),)),
]


def _resemblance(a, b):
    """Returns how many of the words in two CamelCase names are the same, from 0 to 1."""
    a, b = (set(re.findall(r"[A-Z][a-z]*|\d+", name)) - {"Config", "Experts"} for name in (a, b))
    return len(a & b) / len(a | b)


def all_families():
    """Returns a Family for every decorated class in the sources of transformers, and for every variant."""
    families = []
    for source in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = source.read_text(encoding="utf-8")
        if "use_experts_implementation" not in text:
            continue
        names = _DECORATED_CLASS.findall(text)
        if len(names) != len(_DECORATOR.findall(text)) or not names:
            raise LookupError(f"{source} uses use_experts_implementation in a way that this scan does not know")
        families += [Family(source.parent.name, name) for name in names]
    return families + _VARIANTS


def randomise(module, seed, std=0.2):
    """Fills all parameters, biases and norms too, with a normal distribution of the given standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def input_size(experts):
    """Returns the width of x, which is not always the config's hidden size."""
    return experts.down_proj.shape[2 if experts.is_transposed else 1]


def gate_constants(experts):
    """Returns the numbers that the module's gate may read, by attribute name."""
    return {name: value for name, value in vars(experts).items() if isinstance(value, float)}


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything about an experts module that decides which kernels can run it."""

    has_gate: bool
    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    has_post_expert_norm: bool
    own_apply_gate: bool
    gate_constants: tuple
    act_fn: str


def form_of(experts):
    act_fn = getattr(experts, "act_fn", None)
    return Form(
        has_gate=experts.has_gate,
        is_transposed=experts.is_transposed,
        is_concatenated=experts.is_concatenated,
        has_bias=experts.has_bias,
        has_post_expert_norm=getattr(experts, "has_post_expert_norm", False),  # before 5.19
        own_apply_gate=type(experts)._apply_gate is not _default_apply_gate,
        gate_constants=tuple(sorted(gate_constants(experts))),
        act_fn="none" if act_fn is None else getattr(act_fn, "__name__", type(act_fn).__name__),
    )
