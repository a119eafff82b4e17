"""Gemma 3, text: windowed layers and a global one every sixth, norms after each block, a scaled embedding."""

from __future__ import annotations

import math

import numpy as np

from plans.units import Unit
from worker.model import blocks, rope
from worker.model.gguf import ModelFile
from worker.model.metadata import Metadata

_WINDOW = "gemma3.attention.sliding_window"
_PATTERN = "gemma3.attention.sliding_window_pattern"
_LAYERS_OF_27B = 62


def units(file: ModelFile) -> tuple[Unit, ...]:
    """The model as units; raises ModelFileError where metadata and tensors do not agree."""
    sizes, parts, metadata = blocks.read_sizes(file), blocks.Parts(file), file.metadata
    windows = _windows(metadata, sizes.n_layers)
    global_rope = rope.from_metadata(metadata, "gemma3", sizes.rope_dim)
    local_rope = rope.plain(
        sizes.rope_dim, metadata.number("gemma3.rope.freq_base_swa", 10000.0, minimum=1.0)
    )
    built = [blocks.embedding(parts, sizes, scale=math.sqrt(sizes.n_embd))]
    for layer, window_tokens in enumerate(windows):
        attention = blocks.attention(
            parts,
            sizes,
            layer,
            rope=local_rope if window_tokens else global_rope,
            rope_style="half",
            qk_norm=True,
            post_norm=True,
            window_tokens=window_tokens,
            score_scale=_score_scale(sizes),
        )
        built += [attention, blocks.dense_ffn(parts, sizes, layer, "gelu_tanh", post_norm=True)]
    built.append(blocks.head(parts, sizes, metadata.number("gemma3.final_logit_softcapping", 0.0)))
    return parts.finish(built)


def _windows(metadata: Metadata, n_layers: int) -> list[int]:
    """The window of each layer in tokens, 0 where a layer sees everything.

    The pattern is a period (the last layer of each period is global; 0: none is) or one flag a layer (true:
    windowed).
    """
    window_tokens = metadata.integer(_WINDOW, 0)
    if isinstance(metadata.get(_PATTERN), np.ndarray):
        flags = metadata.array(_PATTERN, kind="biu")
        if len(flags) < n_layers:
            raise metadata.refuse(_PATTERN, f"{n_layers} flags, one a layer")
        windowed = [bool(flag) for flag in flags[:n_layers]]
    else:
        period = metadata.integer(_PATTERN, 6)
        windowed = [period == 0 or layer % period < period - 1 for layer in range(n_layers)]
    return [window_tokens if flag else 0 for flag in windowed]


def _score_scale(sizes: blocks.Sizes) -> float:
    """By the length of a head, but the 27B model, known by its layers alone, by embedding over heads."""
    width = sizes.n_embd // sizes.n_heads[0] if sizes.n_layers == _LAYERS_OF_27B else sizes.head_dim
    return 1.0 / math.sqrt(width)
