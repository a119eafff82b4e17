"""How far rounding may move the logits of a step: by about as much as it does in numpy, in the same places.

Random weights do not damp errors, they amplify them where two projections of a rounded input are multiplied (gate and
up), so no fixed number is right for all shapes. `RoundingReference` is the f32 reference with its inputs, weights and
cache rounded as the GPU rounds them. Two correct engines round the same values but, a few operations on, not to the
same side: their errors are two draws of one size, which differ by the square root of two; twice the size is the bound.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda.executors import relative_error
from worker.cuda.linear import needs_codes
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops import reference
from worker.ops.batch import Batch
from worker.ops.lower import lower
from worker.ops.oplist import Op, OpKind
from worker.ops.reference import reference_weights

Float32Array = NDArray[np.float32]
PRODUCTS = (OpKind.LINEAR, OpKind.MOE)
DRAWS = 2.0  # of the size of one rounding's errors


def as_codes(x: Float32Array) -> Float32Array:
    """To 8 bits in groups of 32 of the last axis."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 127
    return np.asarray(np.rint(groups / np.where(scales > 0, scales, 1)) * scales, np.float32).reshape(x.shape)


def as_halves(x: Float32Array) -> Float32Array:
    return x.astype(np.float16).astype(np.float32)


def unpacked_as_halves(weights: Float32Array) -> Float32Array:
    """Quantised weights as kernels unpack them, code * scale - minimum in halves: what is rounded is the product, which
    goes from 0 to about twice the largest weight of its group."""
    groups = weights.reshape(*weights.shape[:-1], -1, 32)
    minimums = np.abs(groups).max(axis=-1, keepdims=True)
    return (as_halves(groups + minimums) - as_halves(minimums)).reshape(weights.shape)


class RoundingReference(reference.ReferenceExecutor):
    """Steps of few tokens round the inputs of products to 8 bits, others inputs and weights to halves; the cache has
    halves."""

    def __init__(self, path: Path, n_pages: int) -> None:
        file = open_model(path)
        super().__init__(lower(archs.units(file)), reference_weights(file), n_pages)
        self.keys = [keys.astype(np.float16) for keys in self.keys]  # type: ignore[misc]
        self.values = [values.astype(np.float16) for values in self.values]  # type: ignore[misc]
        self._uses_codes = False
        self._unpacked = {index for op in self.oplist.ops if op.kind in PRODUCTS for index in op.weights}

    def run(self, batch: Batch) -> Float32Array:
        self._uses_codes = needs_codes(len(batch.token_ids))
        return super().run(batch)

    def inputs(self, op: Op) -> list[Float32Array]:
        first, *others = super().inputs(op)
        if op.kind in PRODUCTS:
            first = as_codes(first) if self._uses_codes else as_halves(first)
        return [first, *others]

    def required(self, index: int) -> Float32Array:
        weight = super().required(index)
        return weight if self._uses_codes or index not in self._unpacked else unpacked_as_halves(weight)


def rounding_bounds(
    path: Path, batches: list[Batch], exact: list[Float32Array], n_pages: int = 16
) -> list[float]:
    """Of the relative error of each step's logits, `exact` being those of the reference."""
    rounded = RoundingReference(path, n_pages)
    return [
        DRAWS * relative_error(rounded.run(batch), logits)
        for batch, logits in zip(batches, exact, strict=True)
    ]


class RouterMargins:
    """By how much routers decided, for each call of the reference's: the smallest lead of a chosen expert over one that
    was not, in units of the logits' spread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.smallest: list[float] = []
        self._choose = reference.choose_experts
        monkeypatch.setattr(reference, "choose_experts", self._watched)

    def _watched(self, logits: Float32Array, bias: object, n_used: int, *rest: object) -> object:
        ordered = np.sort(logits, axis=-1)[:, ::-1]
        lead = ordered[:, n_used - 1] - ordered[:, n_used]
        self.smallest.append(float(lead.min() / logits.std()))
        return self._choose(logits, bias, n_used, *rest)  # type: ignore[arg-type]
