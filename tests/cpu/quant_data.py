"""Random weights in file bytes, and numpy's word on what the kernels should give.

Blocks are random bytes with sane f16 scales, so every code, sub-scale and high bit occurs. Truth comes from the
`gguf` package's dequantisers.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

BLOCK_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
SUPER_BLOCK_TYPES = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K)
QUANT_TYPES = BLOCK_TYPES + SUPER_BLOCK_TYPES
FLOAT_TYPES = (Type.F32, Type.F16, Type.BF16)
ALL_TYPES = QUANT_TYPES + FLOAT_TYPES

# byte offsets of the f16 scale and min in a block
_F16_OFFSETS = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}


def random_weights(rng: np.random.Generator, kind: Type, rows: int, cols: int) -> NDArray[np.uint8]:
    """File bytes [rows, bytes of a row]."""
    if kind in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols), np.float32)
        if kind == Type.F32:
            return values.view(np.uint8)
        if kind == Type.F16:
            return values.astype(np.float16).view(np.uint8)
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    block_cols, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * cols // block_cols, block_bytes), np.uint8)
    for offset in _F16_OFFSETS[kind]:
        scales = rng.uniform(-0.01, 0.02, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def constant_weights(kind: Type, rows: int, cols: int, byte: int) -> NDArray[np.uint8]:
    """File bytes in which every byte but those of the f16 scales is `byte`; scales 0.01, mins 0.02."""
    block_cols, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.full((rows * cols // block_cols, block_bytes), byte, np.uint8)
    for offset, scale in zip(_F16_OFFSETS[kind], (0.01, 0.02), strict=False):
        blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantize(file: NDArray[np.uint8], kind: Type) -> NDArray[np.float32]:
    """[rows, cols] f32 from file bytes [rows, bytes of a row]."""
    if kind == Type.F32:
        return file.view(np.float32)
    if kind == Type.F16:
        return file.view(np.float16).astype(np.float32)
    return gguf.dequantize(file, kind)


def activations_as_prepared(x: NDArray[np.float32], kind: Type) -> NDArray[np.float64]:
    """x as the kernels store it for a weight type: 8 bits with a scale per 32 columns, bf16, or f32."""
    if kind in (Type.F32, Type.F16):
        return x.astype(np.float64)
    if kind == Type.BF16:
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups * inverse).astype(np.float64)
    return (codes * (largest / np.float32(127))).reshape(x.shape)
