# SPDX-License-Identifier: Apache-2.0
"""Compares every experts class of transformers with its eager implementation, in float32."""

import contextlib
import warnings

import pytest
import torch
import transformers
from comparison import IMPLEMENTATION, FallbackWarning, assert_close, counted_calls, relative_error, run_experts
from families import ODD, all_families, form_of, gate_constants, input_size
from families_table import Row

NUM_TOKENS = 37
TOP_K = 2

FAMILIES = all_families()
for_each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)


def routing(experts, num_tokens=NUM_TOKENS, seed=2):
    """Returns x, ids and weights. Ids are distinct in a token, and experts 2 and the last one get no token."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.tensor([e for e in range(experts.num_experts - 1) if e != 2])
    x = torch.randn(num_tokens, input_size(experts), generator=generator)
    scores = torch.rand(num_tokens, len(used), generator=generator)
    ids = used[scores.topk(TOP_K, dim=-1).indices]
    weights = torch.rand(num_tokens, TOP_K, generator=generator) + 0.1
    return x, ids, weights


def output_gradient(x, seed=3):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def fallback_reasons(caught):
    return {str(warning.message) for warning in caught if issubclass(warning.category, FallbackWarning)}


@contextlib.contextmanager
def recorded(family, experts, families_table, case):
    """Records the outcome of one case in the family's row of the table, and checks that the implementation ran."""
    row = families_table.setdefault(family, Row(form=form_of(experts)))
    with warnings.catch_warnings(record=True) as caught, counted_calls() as calls:
        warnings.simplefilter("always")
        try:
            yield row
        except Exception as error:
            reasons = fallback_reasons(caught)
            falls_back = IMPLEMENTATION == "grouped_mm" or reasons or row.fallback
            if falls_back and "strides should be multiple of 16 bytes" in str(error):
                pytest.skip("torch's grouped_mm demands rows that are multiples of 16 bytes")
            row.failures.append(case)
            raise
    reasons = fallback_reasons(caught)
    if reasons:
        row.fallback = "; ".join(sorted(reasons))
    assert calls, f"{IMPLEMENTATION} never ran"
    assert len(reasons) <= 1, f"more than one warning: {reasons}"


def check(row, actual, expected):
    row.worst_error = max(row.worst_error, assert_close(actual, expected))


def test_scan_finds_the_classes():
    """A change of transformers that hides the decorator from the scan must not pass for fewer families."""
    assert len(FAMILIES) >= 50, "transformers 5.22 has 63 classes, and there are 7 variants"
    assert len({family.label for family in FAMILIES}) == len(FAMILIES)
    assert {"mixtral", "gpt_oss", "nemotron_h"} <= {family.folder for family in FAMILIES}


@for_each_family
def test_output_and_gradients(family, families_table):
    experts = family.build()
    x, ids, weights = routing(experts)
    d_y = output_gradient(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    assert set(ids.unique().tolist()) == {0, 1, 3, 4, 5}
    with recorded(family, experts, families_table, "output and gradients") as row:
        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
        check(row, actual, expected)


@for_each_family
def test_odd_sizes(family, families_table):
    """No size is a multiple of four, so that no row but the first starts at a multiple of 16 bytes."""
    experts = family.build(ODD)
    x, ids, weights = routing(experts)
    d_y = output_gradient(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    with recorded(family, experts, families_table, "odd sizes") as row:
        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
        check(row, actual, expected)


@for_each_family
def test_no_tokens(family, families_table):
    """Zero tokens give an empty y, and every gradient is empty, zero or absent."""
    experts = family.build()
    x, ids, weights = routing(experts, num_tokens=0)
    with recorded(family, experts, families_table, "no tokens") as row:
        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, output_gradient(x))
        assert actual["y"].shape == x.shape
        assert actual["y"].dtype == x.dtype
        expected = {name: None if tensor is None else torch.zeros_like(tensor) for name, tensor in actual.items()}
        check(row, actual, expected)


@for_each_family
def test_one_token(family, families_table):
    """A single token is the shape of every decoding step."""
    experts = family.build()
    x, ids, weights = routing(experts, num_tokens=1)
    d_y = output_gradient(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    with recorded(family, experts, families_table, "one token") as row:
        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
        check(row, actual, expected)


@for_each_family
@pytest.mark.parametrize("absent", ["some", "all"])
def test_sentinels(family, absent, families_table):
    """Picks of the expert `num_experts` belong to another rank: they add nothing to y and to any gradient.

    Eager of GPT-OSS and of the privacy filter cannot take such ids. The reference therefore keeps the picks of real
    experts and gives them weight zero, which leaves only the gradients of those weights to be zeroed by hand.
    """
    experts = family.build()
    experts._is_expert_parallel = True
    x, ids, weights = routing(experts)
    d_y = output_gradient(x)
    if absent == "all":
        sentinel = torch.ones_like(ids, dtype=torch.bool)
    else:
        sentinel = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.4
        # Tokens with no, one and two sentinels are all present.
        assert set(sentinel.sum(dim=-1).tolist()) == {0, 1, 2}
    weights = weights.masked_fill(sentinel, 0.0)

    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    expected["top_k_weights.grad"].masked_fill_(sentinel, 0.0)
    sentinel_ids = ids.masked_fill(sentinel, experts.num_experts)
    with recorded(family, experts, families_table, f"{absent} sentinels") as row:
        actual = run_experts(experts, IMPLEMENTATION, x, sentinel_ids, weights, d_y)
        weight_gradient = actual["top_k_weights.grad"]
        assert weight_gradient is None or not weight_gradient[sentinel].any()
        check(row, actual, expected)


@pytest.mark.skipif(transformers.__version__ < "5.19", reason="older classes have constants that they do not read")
def test_limits_bind():
    """The tests above see a wrong clamp only where the limit changes the result, and a wrong alpha likewise."""
    with_constants = 0
    for family in FAMILIES:
        experts = family.build()
        x, ids, weights = routing(experts)
        before = run_experts(experts, "eager", x, ids, weights)["y"]
        with_constants += bool(gate_constants(experts))
        for name, value in gate_constants(experts).items():
            # MiniMax M3 stores its limit twice and reads one of them.
            if name == "limit" and hasattr(experts, "swiglu_limit"):
                continue
            setattr(experts, name, 2 * value)
            after = run_experts(experts, "eager", x, ids, weights)["y"]
            setattr(experts, name, value)
            assert relative_error(after, before) > 0.02, f"{family.label}: {name} = {value} does not matter"
    assert with_constants >= 4  # 6 in transformers 5.22
