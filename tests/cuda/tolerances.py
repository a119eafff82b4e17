"""How far rounding may move the logits of a model with random weights, counted from the roundings on their way.

A rounding adds an error of its own to what it rounds. Random weights neither damp nor favour it, so errors add up as
their squares do, and none reaches the logits at more than its full size: the bound is the error of one times the
square root of their number. It does not hold where an error made a router choose another expert.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from worker.cuda.linear import needs_codes
from worker.ops import reference

# Of normal values in groups of 32, whose largest is 2.4 standard deviations on average: steps of 2.4 / 127, of which
# uniform errors are 1 / sqrt(12).
CODES_ERROR = 2.4 / 127 / math.sqrt(12)
# To 11 bits: at most half of 2^-10, uniform, a third of its square.
HALVES_ERROR = 2.0**-11 / math.sqrt(3)
CODES_PER_LAYER = 4  # inputs of q, k, v; of the output projection; of gate and up; of down
HALVES_PER_LAYER = 12  # those, the weights of each, and query, keys, values and softmax of the attention


def logits_bound(n_layers: int, n_tokens: int) -> float:
    """Of the error of a step's logits relative to their spread; `n_tokens` of a step decide how inputs are rounded."""
    halves = HALVES_ERROR**2 * (HALVES_PER_LAYER * n_layers + 2)
    codes = CODES_ERROR**2 * (CODES_PER_LAYER * n_layers + 1) if needs_codes(n_tokens) else 0.0
    return math.sqrt(halves + codes)


class RouterMargins:
    """What the reference's routers decided by: for every call, the smallest lead of a chosen expert over one that was
    not, in units of the logits' spread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.smallest: list[float] = []
        self._choose = reference.choose_experts
        monkeypatch.setattr(reference, "choose_experts", self._watched)

    def _watched(self, logits: NDArray[np.float32], bias: object, n_used: int, *rest: object) -> object:
        ordered = np.sort(logits, axis=-1)[:, ::-1]
        lead = ordered[:, n_used - 1] - ordered[:, n_used]
        self.smallest.append(float(lead.min() / logits.std()))
        return self._choose(logits, bias, n_used, *rest)  # type: ignore[arg-type]
