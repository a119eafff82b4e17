"""Real models from the folder that PLACEWRIGHT_TEST_MODELS names open, and every type gives numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from worker.model import archs
from worker.model.gguf import open_model
from worker.model.quants import dequantize

FOLDER = os.environ.get("PLACEWRIGHT_TEST_MODELS")
MODELS = sorted(Path(FOLDER).glob("*.gguf")) if FOLDER else []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODELS, reason="PLACEWRIGHT_TEST_MODELS names no folder with GGUF files"),
]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_file_is_cut_into_units_in_no_time(path: Path) -> None:
    started = time.perf_counter()
    file = open_model(path)
    units = archs.units(file)
    assert time.perf_counter() - started < 2.0
    assert len(units) == 2 * file.metadata.integer(f"{file.architecture}.block_count") + 2


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_weights_are_finite_and_small(path: Path) -> None:
    """One tensor of each type: a wrong layout shows as values of wild size."""
    file = open_model(path)
    for kind in {tensor.type for tensor in file.tensors.values()}:
        tensor = next(tensor for tensor in file.tensors.values() if tensor.type == kind)
        row_bytes = tensor.bytes // (tensor.rows * tensor.experts)
        rows = min(tensor.rows, 64)
        values = dequantize(kind, file.tensor_bytes(tensor.name)[: rows * row_bytes], (tensor.columns, rows))
        assert np.isfinite(values).all() and 0 < np.abs(values).mean() < 100
