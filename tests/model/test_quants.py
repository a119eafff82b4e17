"""Decoders against the `gguf` package, bit for bit, on random bytes: any bits may stand in a file."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from configs.errors import ModelFileError
from worker.model import quants
from worker.model.types import BY_ID, BY_NAME, WEIGHT_TYPES


@pytest.mark.parametrize("kind", list(quants.FORMATS))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_equal_to_the_gguf_package(kind: str) -> None:
    rng = np.random.default_rng(BY_NAME[kind].id)
    columns, rows = 512, 700  # more than one piece
    data = rng.integers(0, 256, (rows, BY_NAME[kind].row_bytes(columns)), dtype=np.uint8)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    found = quants.dequantize(kind, data, (columns, rows))
    assert found.shape == (rows, columns) and found.dtype == np.float32
    numbers = ~np.isnan(expected)
    assert (np.isnan(found) == ~numbers).all()
    assert (found.view(np.uint32) == expected.view(np.uint32))[numbers].all()


def test_every_type_of_the_gguf_package_is_decoded() -> None:
    for kind in gguf.GGMLQuantizationType:
        row = np.zeros((1, BY_NAME[kind.name].row_bytes(256)), np.uint8)
        try:
            gguf.quants.dequantize(row, kind)
        except NotImplementedError:
            continue
        assert kind.name in quants.FORMATS


def test_sizes_agree_with_the_gguf_package() -> None:
    for kind, (block_elements, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        known = BY_ID[int(kind)]
        assert known.name == kind.name and known.block_elements == block_elements
        # Q8_1 has two half-precision numbers before its values; the package still counts single precision.
        assert known.block_bytes == (36 if kind.name == "Q8_1" else block_bytes)


def test_layouts_have_the_sizes_of_the_types() -> None:
    assert {kind: form.layout.itemsize for kind, form in quants.FORMATS.items()} == {
        kind: BY_NAME[kind].block_bytes for kind in quants.FORMATS
    }
    assert set(quants.FORMATS) <= WEIGHT_TYPES


def test_stack_of_matrices_keeps_its_axes() -> None:
    data = np.arange(2 * 3 * 32, dtype=np.float32)
    values = quants.dequantize("F32", data.view(np.uint8), (32, 3, 2))
    assert values.shape == (2, 3, 32) and values[1, 0, 0] == 96


@pytest.mark.parametrize(
    ("kind", "size", "shape", "words"),
    [
        ("Q8_K", 292, (256,), "Q8_K cannot be decoded"),
        ("Q4_K", 143, (256,), "144 bytes"),
        ("Q4_K", 72, (128,), "blocks of 256"),
    ],
)
def test_a_type_or_size_that_can_not_be_is_refused(
    kind: str, size: int, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        quants.dequantize(kind, np.zeros(size, np.uint8), shape)
