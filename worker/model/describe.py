"""The one entry for all who want to know what a model file holds: open it, name it, cut it into units."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from plans.units import Unit
from worker.model import archs
from worker.model.gguf import ModelFile, open_model


class ModelDescription(msgspec.Struct, frozen=True):
    """A supported model. `weight_bytes_by_type` adds up the tensors of the file by ggml type name."""

    architecture: str
    name: str
    paths: tuple[str, ...]  # the files, in order
    file_bytes: int
    n_parameters: int
    n_layers: int
    n_embd: int
    n_vocab: int
    context_length_tokens: int  # what the model was trained for
    weight_bytes_by_type: dict[str, int]
    units: tuple[Unit, ...]


def describe(path: str | Path) -> ModelDescription:
    """Open the model at `path` (any part of a split set) and describe it. Raises ModelFileError."""
    return describe_file(open_model(path))


def describe_file(file: ModelFile) -> ModelDescription:
    """The same for a model that is open already."""
    units = archs.units(file)
    prefix, metadata = file.architecture, file.metadata
    return ModelDescription(
        architecture=prefix,
        name=metadata.text("general.name", file.path.stem),
        paths=tuple(str(path) for path in file.paths),
        file_bytes=file.file_bytes,
        n_parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        n_layers=metadata.integer(f"{prefix}.block_count"),
        n_embd=metadata.integer(f"{prefix}.embedding_length"),
        n_vocab=units[0].tensors["token_embd"].rows,
        context_length_tokens=metadata.integer(f"{prefix}.context_length", minimum=1),
        weight_bytes_by_type=_bytes_by_type(file),
        units=units,
    )


def _bytes_by_type(file: ModelFile) -> dict[str, int]:
    totals: dict[str, int] = {}
    for tensor in file.tensors.values():
        totals[tensor.type] = totals.get(tensor.type, 0) + tensor.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
