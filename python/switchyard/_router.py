# SPDX-License-Identifier: Apache-2.0
"""The options of a router: how it scores, chooses and weights experts."""
from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Optional

from ._library import InvalidArgument, check, library

_FORM = struct.Struct("5qd2q")
_SCORES = ("softmax", "sigmoid")
_BIASES = (None, "choice", "logits")


@dataclasses.dataclass(frozen=True)
class RouterForm:
    """A router over num_experts experts that gives top_k of them to every token.

    `score` is "softmax" or "sigmoid". A score bias, if there is one, is added to the scores that
    are compared (bias_enters="choice", as in DeepSeek-V3) or to the logits ("logits"). With
    `normalise`, a token's weights add up to `scale`. Experts are divided into num_expert_groups
    groups, and only the best kept_expert_groups of them are candidates.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    bias_enters: Optional[str] = None
    normalise: bool = True
    scale: float = 1.0
    num_expert_groups: int = 1
    kept_expert_groups: int = 1

    def __post_init__(self) -> None:
        if self.score not in _SCORES:
            raise InvalidArgument(f"score is {self.score!r}, but must be 'softmax' or 'sigmoid'")
        if self.bias_enters not in _BIASES:
            raise InvalidArgument(f"bias_enters is {self.bias_enters!r}, but must be None, "
                                  "'choice' or 'logits'")

    @staticmethod
    def preset(name: str, num_experts: int, top_k: int) -> "RouterForm":
        """Returns the router of a known model: "mixtral", "qwen3_moe", "olmoe", "deepseek_v3"
        (keeps 4 of 8 groups, scale 2.5), "torchtitan", "kempner_forge_softmax" or
        "kempner_forge_sigmoid"."""
        form = ctypes.create_string_buffer(_FORM.size)
        check(library.switchyard_router_preset(name.encode(), ctypes.c_int64(num_experts),
                                               ctypes.c_int64(top_k), form))
        experts, k, sigmoid, bias, normalise, scale, groups, kept = _FORM.unpack(form.raw)
        return RouterForm(experts, k, _SCORES[sigmoid], _BIASES[bias], bool(normalise), scale,
                          groups, kept)

    @property
    def words(self) -> tuple:
        """The fields of a switchyard_router_form."""
        return (int(self.num_experts), int(self.top_k), _SCORES.index(self.score),
                _BIASES.index(self.bias_enters), int(self.normalise), float(self.scale),
                int(self.num_expert_groups), int(self.kept_expert_groups))
