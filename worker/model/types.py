"""Every tensor type a GGUF file may hold: number, name, elements per block and bytes per block.

A fact sheet, so that `inspect` can count the bytes of any file. Whether a type can be turned into numbers is
the matter of `quants.py`, whether there are kernels for it that of the engine.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """`block_elements` consecutive elements of a row are stored in `block_bytes` bytes."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row; `columns` must be a multiple of `block_elements`."""
        return columns // self.block_elements * self.block_bytes


_TYPES = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(9, "Q8_1", 32, 36),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(15, "Q8_K", 256, 292),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(24, "I8", 1, 1),
    TensorType(25, "I16", 1, 2),
    TensorType(26, "I32", 1, 4),
    TensorType(27, "I64", 1, 8),
    TensorType(28, "F64", 1, 8),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(30, "BF16", 1, 2),
    TensorType(34, "TQ1_0", 256, 54),
    TensorType(35, "TQ2_0", 256, 66),
    TensorType(39, "MXFP4", 32, 17),
    TensorType(40, "NVFP4", 64, 36),
    TensorType(41, "Q1_0", 128, 18),
    TensorType(42, "Q2_0", 64, 18),
)

BY_ID: dict[int, TensorType] = {entry.id: entry for entry in _TYPES}
BY_NAME: dict[str, TensorType] = {entry.name: entry for entry in _TYPES}

# Numbers that once had a meaning; files with them have to be converted again.
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Types that hold a model's weights; the others are indices or the format of activations inside of kernels.
WEIGHT_TYPES = frozenset(BY_NAME) - {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
