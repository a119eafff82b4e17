"""Broken files: refused with names and numbers, in well under a second, whatever is broken."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import pytest

from configs.errors import ModelFileError
from tests import tiny
from tests.model import raw_gguf as raw
from worker.model import archs
from worker.model.gguf import open_model

HUGE = 2**62


def refusal(path: Path) -> str:
    """What opening says; the time it takes is part of the promise."""
    started = time.perf_counter()
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    assert time.perf_counter() - started < 1.0
    assert str(path.name) in str(caught.value)
    return str(caught.value)


def model_refusal(path: Path) -> str:
    """The same where another part of the set is named."""
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    return str(caught.value)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    assert "not a regular file" in refusal(tmp_path / "fifo.gguf")
    assert "is a folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="null (byte|character)"):
        open_model("a\0b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>", "looks like a web page"),
        (b"\n\n <html>", "looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"PK\3\4", "PyTorch archive"),
        (b"GG", "starts with b'GG'"),
        (b"GGUF", "4 bytes should follow but the file ends after 0"),
        (raw.build(version=1), "version 1 is not supported"),
        (raw.build(version=4), "version 4 is not supported"),
        (raw.build(version=0x03000000), "big-endian"),
        (raw.build(n_keys=HUGE), f"{HUGE} metadata keys are impossible: the limit"),
        (raw.build(n_tensors=HUGE), f"{HUGE} tensors are impossible"),
        (raw.build([raw.number("a", 1)], n_keys=2), "2 metadata keys need at least 26 bytes"),
        (raw.build([struct.pack("<Q", HUGE) + bytes(40)]), f"a string of {HUGE} bytes"),
        (raw.build([raw.key(b"\xff\xfe", 4, bytes(4))]), "is not UTF-8"),
        (raw.build([raw.key("", 4, bytes(4))]), "no name"),
        (raw.build([raw.key("a", 13, bytes(4))]), "value type 13 is unknown"),
        (raw.build([raw.number("a", 1), raw.number("a", 2)]), "the key occurs twice (in metadata key 2 of 2"),
        (raw.build([raw.array("a", raw.UINT32, HUGE, bytes(40))]), f"{HUGE} array entries"),
        (raw.build([raw.array("a", raw.STRING, HUGE, bytes(40))]), f"{HUGE} strings are impossible"),
        (
            raw.build([raw.array("a", raw.STRING, 3, raw.text("x" * 99)[:-50])]),
            "strings should follow but the file ends after 0",
        ),
        (raw.build([raw.array("a", raw.ARRAY, 1, bytes(40))]), "arrays of arrays"),
        (raw.build([raw.array("a", 77, 1, bytes(40))]), "array type 77"),
        (raw.build([raw.number("general.alignment", 0)]), "general.alignment = 0, expected a power of two"),
        (raw.build([raw.number("general.alignment", 48)]), "general.alignment = 48"),
        (raw.build([raw.words("general.alignment", "32")]), "general.alignment = '32'"),
        (raw.build(None, [raw.tensor("t", ()) + bytes(8)]), "0 dimensions, expected 1 to 4"),
        (raw.build(None, [raw.tensor("t", (1,) * 5)]), "5 dimensions, expected 1 to 4"),
        (raw.build(None, [raw.tensor("", (1, 1))]), "it has no name"),
        (raw.build(None, [raw.tensor("t", (4, 0))], 64), "shape [4, 0] is impossible"),
        (raw.build(None, [raw.tensor("t", (2**40, 2**40))], 64), "is impossible"),
        (
            raw.build(None, [raw.tensor("t", (33,), 8)], 64),
            "rows of 33 cannot be Q8_0, whose blocks hold 32",
        ),
        (
            raw.build(None, [raw.tensor("t", (32,), 4)], 64),
            "tensor type 4 is unknown (Q4_2, no longer in use",
        ),
        (raw.build(None, [raw.tensor("t", (32,), 999)], 64), "tensor type 999 is unknown"),
        (
            raw.build(None, [raw.tensor("t", (4,), 0, 4)], 64),
            "has offset 4, not a multiple of the alignment 32",
        ),
        (
            raw.build(None, [raw.tensor("t", (16,)), raw.tensor("u", (4,), 0, 32)], 96),
            "u at offset 32 overlaps tensor t",
        ),
        (raw.build(None, [raw.tensor("t", (4,)), raw.tensor("t", (4,), 0, 32)], 96), "tensor t occurs twice"),
        (
            raw.build(None, [raw.tensor("t", (400,))], 64),
            "tensor t needs bytes 64 to 1664 but the file has 128",
        ),
        (raw.build(None, [raw.tensor("t", (4,), 0, HUGE)], 64), "but the file has 128"),
        (raw.build(None, [raw.tensor("t", (2**61,), 24)], 64), "but the file has 128"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_broken_content(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_file_of_zeros_behind_a_header_ends_soon(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(raw.build([raw.array("a", raw.STRING, 2**30, b"")]))
    os.truncate(path, 2**34)
    assert "strings are impossible: the limit is" in refusal(path)


def test_strings_that_are_not_text_are_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.build([raw.array("a", raw.STRING, 2, raw.text("fine") + raw.text(b"\xff"))]))
    strings = open_model(path).metadata.strings("a")
    assert strings[0] == "fine"
    with pytest.raises(ModelFileError, match=r"metadata key a, entry 1: b'\\xff' is not UTF-8"):
        strings.tolist()


def test_broken_split_sets(tmp_path: Path) -> None:
    first = tiny.write_model(tmp_path, quant="Q8_0", split_max_tensors=8)
    second, third = (first.with_name(first.name.replace("00001-", f"0000{n}-")) for n in (2, 3))
    third.rename(tmp_path / "aside")
    assert (
        f"the set has 3 parts, 2 of them are in {tmp_path}; the first missing one is {third.name}"
        in refusal(first)
    )
    third.write_bytes(second.read_bytes())
    assert "split.no = 1 and split.count = 3, but its name says part 2" in refusal(third)
    third.unlink()
    (tmp_path / "aside").rename(third)
    open_model(second)
    first.rename(tmp_path / "renamed.gguf")
    assert "does not end in -00001-of-00003.gguf" in refusal(tmp_path / "renamed.gguf")


def test_counts_of_tensors_in_split_sets(tmp_path: Path) -> None:
    for number in range(2):
        key = raw.number
        keys = [key("split.no", number), key("split.count", 2), key("split.tensors.count", 3)]
        tensors = [raw.tensor(f"tensor{number}", (4,))]
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(raw.build(keys, tensors, 16))
    path = tmp_path / "m-00001-of-00002.gguf"
    assert "split.tensors.count = 3 but the 2 parts hold 2 tensors" in refusal(path)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(
        raw.build([*keys[:2]], [raw.tensor("tensor0", (4,))], 16)
    )
    first = raw.build([raw.number("split.no", 0), keys[1]], [raw.tensor("tensor0", (4,))], 16)
    path.write_bytes(first)
    assert "m-00002-of-00002.gguf: tensor tensor0 is already in m-00001-of-00002.gguf" in model_refusal(path)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    content = tiny.write_model(tmp_path, n_layers=1, quant="Q2_K").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    steps = [*range(0, 20_000, 37), *range(20_000, len(content), 9_973), len(content) - 1]
    last_tensor = max(tensor.offset_bytes + tensor.bytes for tensor in open_model(path).tensors.values())
    for size in sorted((size for size in steps if size < last_tensor), reverse=True):
        os.truncate(path, size)
        with pytest.raises(ModelFileError):
            open_model(path)


def test_flipped_bytes_never_do_more_than_refuse(tmp_path: Path) -> None:
    """Whatever the header says, opening and describing either works or raises ModelFileError."""
    content = tiny.write_model(tmp_path, n_layers=1, arch="gemma3", quant="IQ1_S").read_bytes()
    header_bytes = min(
        tensor.offset_bytes for tensor in open_model(next(tmp_path.glob("*.gguf"))).tensors.values()
    )
    path = tmp_path / "flipped.gguf"
    generator = random.Random(7)
    refused = 0
    for _ in range(600):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 2, 8))):
            changed[generator.randrange(header_bytes)] = generator.choice(
                (0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256))
            )
        path.write_bytes(changed)
        started = time.perf_counter()
        try:
            archs.units(open_model(path))
            for value in open_model(path).metadata.values():
                list(value) if hasattr(value, "__iter__") else value
        except ModelFileError:
            refused += 1
        assert time.perf_counter() - started < 1.0
    assert refused > 50
