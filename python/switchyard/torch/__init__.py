"""Mixture-of-Experts layers for PyTorch, on CPUs and GPUs.

Importing this module registers the experts implementation "switchyard" with Hugging Face
transformers, if that is installed:

    import switchyard.torch
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="switchyard")

The functions below are for models of your own: plan → moe is the whole layer, plan → dispatch →
experts → combine its parts.
"""
from .._activations import DEFAULT_CONSTANTS, Activation
from ._device import host_syncs
from ._functions import Plan, combine, dispatch, experts, moe, plan, route
from ._hugging_face import FallbackWarning, experts_forward, register

__all__ = ["Activation", "DEFAULT_CONSTANTS", "FallbackWarning", "Plan", "combine", "dispatch",
           "experts", "experts_forward", "host_syncs", "moe", "plan", "register", "route"]

register()
