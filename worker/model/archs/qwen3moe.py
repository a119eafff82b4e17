"""Qwen3 with routed experts in every layer; the attention is that of dense Qwen3."""

from __future__ import annotations

from plans.units import Unit
from worker.model import blocks, rope
from worker.model.gguf import ModelFile


def units(file: ModelFile) -> tuple[Unit, ...]:
    """The model as units; raises ModelFileError where metadata and tensors do not agree."""
    sizes, parts, metadata = blocks.read_sizes(file), blocks.Parts(file), file.metadata
    frequencies = rope.from_metadata(metadata, "qwen3moe", sizes.rope_dim)
    n_experts, n_used = blocks.expert_counts(file, required=True)
    n_ff_expert = metadata.integer("qwen3moe.expert_feed_forward_length", sizes.n_ff[0] // n_used, minimum=1)
    built = [blocks.embedding(parts, sizes)]
    for layer in range(sizes.n_layers):
        built.append(blocks.attention(parts, sizes, layer, rope=frequencies, rope_style="half", qk_norm=True))
        built.append(blocks.moe_ffn(parts, sizes, layer, n_experts, n_used, n_ff_expert))
    built.append(blocks.head(parts, sizes))
    return parts.finish(built)
