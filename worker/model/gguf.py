"""Opens a GGUF model, one file or a split set, by mapping it: nothing of the weights is read.

`gguf_header.py` parses one file; here the parts of a split set are found from any of them and joined.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.errors import ModelFileError
from plans.units import TensorRef
from worker.model.gguf_header import Header, read_header
from worker.model.metadata import Metadata, MetadataValue

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class ModelFile:
    """A model on disk. `paths` are its files in order; `tensors` keep the order of the file."""

    metadata: Metadata
    tensors: dict[str, TensorRef]
    paths: tuple[Path, ...]
    buffers: tuple[mmap.mmap, ...]

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")

    @property
    def file_bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, a read-only uint8 view of the mapping. Raises ModelFileError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"{self.path}: there is no tensor {name} among the {len(self.tensors)} of the file"
            )
        return np.frombuffer(self.buffers[tensor.file_index], np.uint8, tensor.bytes, tensor.offset_bytes)


def open_model(path: str | Path) -> ModelFile:
    """Open a GGUF file or, from any of its parts, a split set. Raises ModelFileError."""
    path = Path(path)
    header = read_header(path)
    if _split_number(header, "split.count", default=1) == 1:
        return _join([header])
    return _join(_read_parts(header))


def _split_number(header: Header, key: str, default: int = -1) -> int:
    return Metadata(header.path, header.metadata).integer(key, default, minimum=-1)


def _read_parts(opened: Header) -> list[Header]:
    """All parts of the set that `opened` belongs to, each checked to be the one it is named."""
    paths = _part_paths(opened)
    total = len(paths)
    headers = [opened if path == opened.path else read_header(path) for path in paths]
    for index, header in enumerate(headers):
        number, count = _split_number(header, "split.no"), _split_number(header, "split.count")
        if (number, count) != (index, total):
            raise ModelFileError(
                f"{header.path}: split.no = {number} and split.count = {count}, but its name says part "
                f"{index} (counted from 0) of {total}; the parts do not belong together"
            )
    expected = _split_number(headers[0], "split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if expected >= 0 and expected != found:
        raise ModelFileError(
            f"{headers[0].path}: split.tensors.count = {expected} but the {total} parts hold {found} tensors"
        )
    return headers


def _part_paths(opened: Header) -> list[Path]:
    count = _split_number(opened, "split.count")
    match = _PART_NAME.fullmatch(opened.path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{opened.path}: is one of {count} parts (split.count) but its name does not end in "
            f"-00001-of-{count:05d}.gguf; give the parts their original names"
        )
    folder = opened.path.parent
    names = [f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFileError(
            f"{opened.path}: the set has {count} parts, {count - len(missing)} of them are in {folder}; "
            f"the first missing one is {missing[0]}"
        )
    return [folder / name for name in names]


def _join(headers: list[Header]) -> ModelFile:
    """One model of its parts; the metadata of the first part counts."""
    tensors: dict[str, TensorRef] = {}
    for index, header in enumerate(headers):
        for info in header.tensors:
            if info.name in tensors:
                other = headers[tensors[info.name].file_index].path.name
                raise ModelFileError(f"{header.path}: tensor {info.name} is already in {other}")
            tensors[info.name] = TensorRef(
                info.name, info.type, info.shape, info.bytes, file_index=index, offset_bytes=info.offset_bytes
            )
    values: dict[str, MetadataValue] = headers[0].metadata
    return ModelFile(
        metadata=Metadata(headers[0].path, values),
        tensors=tensors,
        paths=tuple(header.path for header in headers),
        buffers=tuple(header.buffer for header in headers),
    )
