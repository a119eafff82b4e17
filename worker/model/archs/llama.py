"""Llama and what shares its metadata: Llama 1 to 3, SmolLM2, Mistral, and Mixtral with routed experts."""

from __future__ import annotations

from configs.errors import ModelFileError
from plans.units import Unit
from worker.model import blocks, rope
from worker.model.gguf import ModelFile


def units(file: ModelFile) -> tuple[Unit, ...]:
    """The model as units; raises ModelFileError where metadata and tensors do not agree."""
    sizes, parts, metadata = blocks.read_sizes(file), blocks.Parts(file), file.metadata
    if sizes.rope_dim != sizes.head_dim:
        raise metadata.refuse("llama.rope.dimension_count", f"{sizes.head_dim}, the length of a head")
    factors = parts.read_vector("rope_freqs.weight", sizes.rope_dim // 2)
    frequencies = rope.from_metadata(metadata, "llama", sizes.rope_dim, factors)
    n_experts, n_experts_used = blocks.expert_counts(file, required=False)
    _refuse_separate_experts(file, n_experts)
    built = [blocks.embedding(parts, sizes)]
    for layer in range(sizes.n_layers):
        built.append(blocks.attention(parts, sizes, layer, rope=frequencies, rope_style="interleaved"))
        if n_experts:
            built.append(blocks.moe_ffn(parts, sizes, layer, n_experts, n_experts_used, sizes.n_ff[layer]))
        else:
            built.append(blocks.dense_ffn(parts, sizes, layer))
    built.append(blocks.head(parts, sizes))
    return parts.finish(built)


def _refuse_separate_experts(file: ModelFile, n_experts: int) -> None:
    name = "blk.0.ffn_gate.0.weight"
    if n_experts and name in file.tensors:
        raise ModelFileError(
            f"{file.path}: each expert is a tensor of its own ({name}), a format given up in 2024; files "
            "with stacked experts (blk.0.ffn_gate_exps.weight) are supported, convert the model again"
        )
