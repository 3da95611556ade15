# SPDX-License-Identifier: Apache-2.0
"""The shapes of known layers, T, H, I, E, K, from the list that `switchyard bench layer` uses."""
import argparse
import pathlib
import re

HEADER = pathlib.Path(__file__).resolve().parents[1] / "cli/bench/layer_shapes.h"
ENTRY = re.compile(r'\{"([\w-]+)",\s+((?:\d+,\s+){4}\d+)\}')


def read_shapes(text):
    return {name: tuple(int(size) for size in sizes.split(",")) for name, sizes in
            ENTRY.findall(text)}


SHAPES = read_shapes(HEADER.read_text(encoding="utf-8").partition("kGpuShapes")[2])


def shape_of(name):
    """Returns a known shape, or parses T x H x I x E x K, as in 16384x2048x768x128x1."""
    if name in SHAPES:
        return SHAPES[name]
    sizes = name.split("x")
    if len(sizes) != 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{name} is neither TxHxIxExK nor one of {', '.join(SHAPES)}")
    shape = tuple(int(size) for size in sizes)
    if shape[4] > shape[3]:
        raise ValueError(f"{name}: K ({shape[4]}) must not exceed E ({shape[3]})")
    return shape


def parse_groups(text):
    """Parses groups of shapes, as in a,b/c,d. An argparse type."""
    groups = [group.split(",") for group in text.split("/")]
    for name in sum(groups, []):
        try:
            shape_of(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return groups


def parse_names(text):
    """Parses shapes separated by commas. An argparse type."""
    return sum(parse_groups(text), [])
