# SPDX-License-Identifier: Apache-2.0
"""Compares an experts implementation with transformers' own "eager" one.

SWITCHYARD_TEST_EXPERTS names the implementation under test; the default is "switchyard".
"""

import contextlib
import os

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = os.environ.get("SWITCHYARD_TEST_EXPERTS", "switchyard")

if IMPLEMENTATION == "switchyard":
    import switchyard.torch

    FallbackWarning = switchyard.torch.FallbackWarning
else:

    class FallbackWarning(UserWarning):
        """Stands in for switchyard.torch.FallbackWarning, which other implementations never emit."""


# A difference of this relative norm is float32 rounding. A wrong formula is off by 1e-2 or more.
TOLERANCE = 1e-5


def relative_error(actual, expected):
    """Returns |actual - expected| / |expected|, with the Frobenius norm in float64."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = torch.linalg.vector_norm(actual - expected).item()
    if difference == 0:
        return 0.0
    norm = torch.linalg.vector_norm(expected).item()
    # NaN and infinity must fail every comparison with a tolerance.
    error = difference / norm if norm > 0 else float("inf")
    return error if error == error else float("inf")


def relative_errors(actual, expected):
    """Returns the relative error of every tensor in two dicts that must have the same names.

    A gradient of None counts as a gradient of zeros, because autograd leaves out what nothing reached.
    """
    assert actual.keys() == expected.keys()
    errors = {}
    for name in expected:
        a, e = actual[name], expected[name]
        if a is None and e is None:
            continue
        a = torch.zeros_like(e) if a is None else a
        e = torch.zeros_like(a) if e is None else e
        errors[name] = relative_error(a, e)
    return errors


def assert_close(actual, expected, tolerance=TOLERANCE):
    """Asserts that every tensor of one dict is close to its namesake, and returns the worst relative error."""
    errors = relative_errors(actual, expected)
    worst_first = sorted(errors, key=errors.get, reverse=True)
    too_far = [f"{name} {errors[name]:.1e}" for name in worst_first if not errors[name] <= tolerance]
    assert not too_far, (
        f"{len(too_far)} of {len(errors)} tensors have relative errors above {tolerance:g}: {', '.join(too_far[:8])}"
    )
    return errors[worst_first[0]]


def parameter_gradients(module):
    """Returns a copy of the gradient of every parameter, None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def run_experts(experts, implementation, x, ids, weights, d_y=None, forward=None):
    """Runs one implementation forward and backward on leaves of its own; returns y and every gradient.

    Without d_y there is no backward pass. Gradients of parameters start at None. A forward of the caller's own wraps
    the module: it may be the compiled module, for instance.
    """
    experts.config._experts_implementation = implementation
    experts.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(d_y is not None)
    weights = weights.detach().clone().requires_grad_(d_y is not None)
    # The clone keeps an implementation that writes into ids from spoiling the next run.
    y = (experts if forward is None else forward)(x, ids.clone(), weights)
    results = {"y": y.detach()}
    if d_y is None:
        return results
    # Eager's y has no history where no expert runs; its gradients are then zeros.
    if y.requires_grad:
        y.backward(d_y)
    results["x.grad"] = x.grad
    results["top_k_weights.grad"] = weights.grad
    for name, gradient in parameter_gradients(experts).items():
        results[f"{name}.grad"] = gradient
    return results


@contextlib.contextmanager
def counted_calls(implementation=IMPLEMENTATION):
    """Counts the calls that reach the implementation, so that a test can tell that it compared two different ones."""
    original = ALL_EXPERTS_FUNCTIONS[implementation]
    calls = []

    def counting(module, *args, **kwargs):
        calls.append(type(module).__name__)
        return original(module, *args, **kwargs)

    # This entry is local to the one interface object and hides the registered function until it is deleted.
    ALL_EXPERTS_FUNCTIONS[implementation] = counting
    try:
        yield calls
    finally:
        del ALL_EXPERTS_FUNCTIONS[implementation]
