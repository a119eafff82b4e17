"""Rotary position frequencies from metadata: plain, linear, YaRN, and per-frequency factors.

The result is what an attention unit carries: one inverse frequency for each rotated pair, scaling applied,
and the factor on cos and sin. Scaling that is not known is refused by key and value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from configs.errors import ModelFileError
from worker.model.metadata import Metadata


class Rope(NamedTuple):
    """`inverse_frequencies[i]`: radians per position of pair i; `magnitude` multiplies cos and sin."""

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


def plain(rope_dim: int, base: float, factors: np.ndarray | None = None) -> Rope:
    """Unscaled frequencies base ** (-2 i / rope_dim), each divided by its factor (f32[rope_dim / 2])."""
    return Rope(tuple(_frequencies(rope_dim, base, factors).tolist()))


def from_metadata(metadata: Metadata, prefix: str, rope_dim: int, factors: np.ndarray | None = None) -> Rope:
    """Frequencies by the keys `<prefix>.rope.*`. Raises ModelFileError for scaling that is not supported."""
    base = metadata.number(f"{prefix}.rope.freq_base", 10000.0, minimum=1.0)
    if factors is not None and not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(
            f"{metadata.path}: tensor rope_freqs.weight holds factors that are not positive numbers"
        )
    frequencies = _frequencies(rope_dim, base, factors)
    type_key = f"{prefix}.rope.scaling.type"
    kind = metadata.text(type_key, "linear")
    magnitude = metadata.number(f"{prefix}.rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return Rope(tuple(frequencies.tolist()), magnitude)
    factor = _scaling_factor(metadata, prefix)
    if kind == "linear":
        return Rope(tuple((frequencies / factor).tolist()), magnitude)
    if kind == "yarn":
        scaled = _yarn(metadata, prefix, rope_dim, base, frequencies, factor)
        return Rope(tuple(scaled.tolist()), magnitude * _yarn_magnitude(metadata, prefix, factor))
    raise metadata.refuse(type_key, "one of none, linear, yarn")


def _frequencies(rope_dim: int, base: float, factors: np.ndarray | None) -> np.ndarray:
    """float64[rope_dim / 2]."""
    exponents = np.arange(0, rope_dim, 2) / rope_dim
    frequencies = np.power(base, -exponents)
    return frequencies if factors is None else frequencies / factors.astype(np.float64)


def _scaling_factor(metadata: Metadata, prefix: str) -> float:
    """How many times the trained context was stretched; 0 stands for 1, `scale_linear` is the old key."""
    old = metadata.number(f"{prefix}.rope.scale_linear", 0.0)
    return metadata.number(f"{prefix}.rope.scaling.factor", old) or 1.0


def _yarn(
    metadata: Metadata, prefix: str, rope_dim: int, base: float, frequencies: np.ndarray, factor: float
) -> np.ndarray:
    """YaRN (arXiv 2309.00071): fast pairs keep their frequency, slow ones are interpolated, with a ramp."""
    context = metadata.integer(f"{prefix}.context_length", minimum=1)
    original = metadata.integer(f"{prefix}.rope.scaling.original_context_length", context, minimum=1)
    beta_fast = metadata.number(f"{prefix}.rope.scaling.yarn_beta_fast", 32.0, minimum=1e-3)
    beta_slow = metadata.number(f"{prefix}.rope.scaling.yarn_beta_slow", 1.0, minimum=1e-3)
    if base == 1.0:
        raise metadata.refuse(f"{prefix}.rope.freq_base", "more than 1 with yarn scaling")

    def pair_with(rotations: float) -> float:
        return rope_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(pair_with(beta_fast)))
    high = min(rope_dim - 1.0, math.ceil(pair_with(beta_slow)))
    ramp = (np.arange(rope_dim // 2) - low) / max(0.001, high - low)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    scaled: np.ndarray = frequencies / factor * (1.0 - keep) + frequencies * keep
    return scaled


def _yarn_magnitude(metadata: Metadata, prefix: str, factor: float) -> float:
    """0.1 ln(factor) + 1; the variants of YaRN that set it otherwise are refused."""
    for name, usual in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)):
        key = f"{prefix}.rope.scaling.{name}"
        if metadata.number(key, usual) != usual:
            raise metadata.refuse(key, f"{usual:g} (other values are not supported)")
    return 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
