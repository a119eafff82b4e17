"""Reading sound GGUF files: what the `gguf` package wrote is what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from configs.errors import ModelFileError
from tests import tiny
from tests.model import raw_gguf as raw
from worker.model.gguf import open_model
from worker.model.metadata import StringArray


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, arch="qwen3moe", quant="Q4_K")
    model, reader = open_model(path), gguf.GGUFReader(path)
    assert model.architecture == "qwen3moe" and model.paths == (path,)
    assert model.file_bytes == path.stat().st_size
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            found = model.metadata[name]
            assert (list(found) if isinstance(found, np.ndarray | StringArray) else found) == field.contents()
    assert list(model.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = model.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape) and ours.type == tensor.tensor_type.name
        stored = model.tensor_bytes(tensor.name)
        assert not stored.flags.writeable
        assert (stored == np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)).all()


def test_split_set_opens_from_any_part(tmp_path: Path) -> None:
    whole = open_model(tiny.write_model(tmp_path / "..", quant="Q8_0"))
    tiny.write_model(tmp_path, quant="Q8_0", split_max_tensors=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 4
    for part in parts:
        model = open_model(part)
        assert model.paths == tuple(parts)
        assert model.architecture == "llama"
        assert model.tensors.keys() == whole.tensors.keys()
        for name in model.tensors:
            assert (model.tensor_bytes(name) == whole.tensor_bytes(name)).all()


def test_half_a_million_tokens_open_quickly(tmp_path: Path) -> None:
    tokens = [f"token-{index}" for index in range(500_000)]
    payload = b"".join(raw.text(token) for token in tokens)
    path = tmp_path / "big.gguf"
    path.write_bytes(raw.build([raw.array("tokenizer.ggml.tokens", raw.STRING, len(tokens), payload)]))
    started = time.perf_counter()
    strings = open_model(path).metadata.strings("tokenizer.ggml.tokens")
    assert strings.tolist() == tokens
    assert time.perf_counter() - started < 2.0
    assert (
        strings[-1] == "token-499999" and strings[1:3] == ["token-1", "token-2"] and len(strings) == 500_000
    )


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    keys = [raw.number("general.alignment", 8)]
    path.write_bytes(
        raw.build(keys, [raw.tensor("a", (3,)), raw.tensor("b", (2,), 0, 16)], 24, version=2, alignment=8)
    )
    model = open_model(path)
    assert model.tensors["b"].offset_bytes - model.tensors["a"].offset_bytes == 16
    assert model.tensor_bytes("b").size == 8


def test_typed_getters_refuse_by_key_and_value(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = [raw.number("count", 7), raw.words("name", "x"), raw.key("yes", raw.BOOL, b"\1")]
    keys.append(raw.array("list", raw.UINT32, 2, b"\3\0\0\0\4\0\0\0"))
    path.write_bytes(raw.build(keys))
    metadata = open_model(path).metadata
    assert metadata.integer("count") == 7 and metadata.number("count") == 7.0
    assert metadata.flag("yes") and metadata.per_layer("list", 2) == (3, 4)
    assert metadata.per_layer("count", 3) == (7, 7, 7) and metadata.integer("absent", 5) == 5
    refusals: dict[str, Callable[[], object]] = {
        "count = 7, expected a whole number from 8 to 9": lambda: metadata.integer(
            "count", minimum=8, maximum=9
        ),
        "absent is missing, expected a string": lambda: metadata.text("absent"),
        "name = 'x', expected true or false": lambda: metadata.flag("name"),
        r"list = \[3, 4\] \(2 entries\), expected 3 whole numbers": lambda: metadata.per_layer("list", 3),
        "yes = True, expected a whole number": lambda: metadata.integer("yes"),
        "count = 7, expected an array of strings": lambda: metadata.strings("count"),
    }
    for words, call in refusals.items():
        with pytest.raises(ModelFileError, match=words):
            call()
