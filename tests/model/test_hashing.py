"""The content hash: complete, independent of threads, honest about progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ModelFileError
from worker.model import hashing


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "LEAF_BYTES", 1000)


@pytest.mark.usefixtures("small_leaves")
def test_every_byte_and_the_length_count(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = bytes(range(256)) * 20
    path.write_bytes(content)
    whole = hashing.hash_file(path)
    assert whole.startswith("blake2b-tree32m:") and len(whole.split(":")[1]) == 64
    for position in (0, 999, 1000, 5119):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert hashing.hash_file(path) != whole
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        assert hashing.hash_file(path) != whole


@pytest.mark.usefixtures("small_leaves")
def test_threads_do_not_matter_and_progress_reaches_the_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 4500)
    seen: list[tuple[int, int]] = []
    hashes = {hashing.hash_file(path, lambda *step: seen.append(step), threads=count) for count in (1, 2, 5)}
    assert len(hashes) == 1
    assert seen == [(1000, 4500), (2000, 4500), (3000, 4500), (4000, 4500), (4500, 4500)] * 3


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nothing.gguf: can not be read: No such file"):
        hashing.hash_file(tmp_path / "nothing.gguf")
