# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts layers for PyTorch, on CPUs and GPUs.

Importing this module registers the experts implementation "switchyard" with Hugging Face
transformers, if that is installed:

    import switchyard.torch
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="switchyard")

The functions below are for your own models: plan → moe is the whole layer, and plan → dispatch →
experts → combine are its parts. Under torchrun, apply_expert_parallel divides a model's experts
over ranks, and ExpertParallel offers the same parts across ranks.
"""
from .._activations import DEFAULT_CONSTANTS, Activation
from ._balancer import LoadBalancer
from ._device import host_syncs
from ._expert_parallel import ExpertParallel, SharedPlan
from ._functions import Plan, combine, dispatch, experts, moe, plan, route
from ._hugging_face import FallbackWarning, experts_forward, register
from ._hugging_face_parallel import InstalledEp, install_ep
from ._parallelize import (apply_expert_parallel, clip_grad_norm_, expert_parameters,
                           parameter_groups, reduce_gradients)
from ._process_group import communicator
from ._sequence import SequenceShard
from ._steps import StepResult, run_step

__all__ = ["Activation", "DEFAULT_CONSTANTS", "ExpertParallel", "FallbackWarning", "InstalledEp",
           "LoadBalancer", "Plan", "SequenceShard", "SharedPlan", "StepResult",
           "apply_expert_parallel", "clip_grad_norm_", "combine", "communicator", "dispatch",
           "expert_parameters", "experts", "experts_forward", "host_syncs", "install_ep", "moe",
           "parameter_groups", "plan", "reduce_gradients", "register", "route", "run_step"]

register()
