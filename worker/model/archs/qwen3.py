"""Qwen3, dense: norms on each head of q and k before a rotation in halves, no biases."""

from __future__ import annotations

from plans.units import Unit
from worker.model import blocks, rope
from worker.model.gguf import ModelFile


def units(file: ModelFile) -> tuple[Unit, ...]:
    """The model as units; raises ModelFileError where metadata and tensors do not agree."""
    sizes, parts = blocks.read_sizes(file), blocks.Parts(file)
    frequencies = rope.from_metadata(file.metadata, "qwen3", sizes.rope_dim)
    built = [blocks.embedding(parts, sizes)]
    for layer in range(sizes.n_layers):
        built.append(blocks.attention(parts, sizes, layer, rope=frequencies, rope_style="half", qk_norm=True))
        built.append(blocks.dense_ffn(parts, sizes, layer))
    built.append(blocks.head(parts, sizes))
    return parts.finish(built)
