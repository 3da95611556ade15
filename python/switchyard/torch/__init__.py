"""Mixture-of-Experts layers for PyTorch, on CPUs and GPUs.

Importing this module registers the experts implementation "switchyard" with Hugging Face
transformers, if that is installed:

    import switchyard.torch
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="switchyard")

The functions below are for models of your own: plan → moe is the whole layer, plan → dispatch →
experts → combine its parts.
"""
from .._activations import Activation
from ._functions import (DEFAULT_CONSTANTS, Plan, combine, dispatch, experts, moe, plan, route)
from ._hugging_face import FallbackWarning, experts_forward, register
from ._ops import host_syncs

__all__ = ["Activation", "DEFAULT_CONSTANTS", "FallbackWarning", "Plan", "combine", "dispatch",
           "experts", "experts_forward", "host_syncs", "moe", "plan", "register", "route"]

register()
