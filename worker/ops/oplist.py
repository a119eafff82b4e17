"""The flat list of operations that a forward pass is: what `lower.py` writes and every executor runs.

The kinds and their operands are those of `worker/cpu/pw_cpu.h` (pw_op_kind), where each is described once.
Frozen values; no arrays but constants.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from plans.units import TensorRef


class OpKind(enum.IntEnum):
    EMBED = 1
    RMS_NORM = 2
    LINEAR = 3
    ROPE_STORE = 4
    ATTENTION = 5
    GLU = 6
    ROUTER = 7
    MOE = 8
    SELECT = 9
    SAMPLE = 10


ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}
ROPE_STYLE_CODES = {"interleaved": 0, "half": 1}
GATING_CODES = {"softmax": 0, "sigmoid": 1}


class Buffer(msgspec.Struct, frozen=True):
    """f32 [rows, width]; rows are the tokens of the batch, or its outputs after SELECT."""

    name: str
    width: int
    is_output: bool = False


class Weight(msgspec.Struct, frozen=True):
    """A tensor of the model file, or a constant f32 vector computed from its metadata.

    `packed`: a matrix that LINEAR, ROUTER or MOE multiplies with; only these are laid out for the kernels.
    """

    name: str
    tensor: TensorRef | None = None
    constant: tuple[float, ...] = ()
    packed: bool = False


class Op(msgspec.Struct, frozen=True):
    """One operation. `inputs`/`outputs` index buffers, `weights`/`biases` index weights; -1 is none."""

    kind: OpKind
    layer: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    biases: tuple[int, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()


class LinearInts(NamedTuple):
    """The `ints` of a LINEAR by name; so for every kind with several. C++ has the same in worker/cpu/op_args.h."""

    n_outputs: int
    accumulates: int  # the first output only


class RopeStoreInts(NamedTuple):
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_style: int  # ROPE_STYLE_CODES
    kv_layer: int


class AttentionInts(NamedTuple):
    """The first six are where ROPE_STORE has them, so that both are read alike."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    unused_rope_dim: int
    unused_rope_style: int
    kv_layer: int
    window_tokens: int  # 0 = all


class RouterInts(NamedTuple):
    n_experts: int
    n_used: int
    gating: int  # GATING_CODES
    normalizes: int


class MoeInts(NamedTuple):
    activation: int  # ACTIVATION_CODES
    n_used: int
    accumulates: int


class KvLayer(msgspec.Struct, frozen=True):
    """One layer of the key/value cache."""

    n_kv_heads: int
    head_dim: int


class OpList(msgspec.Struct, frozen=True):
    """A lowered model. Weights stand in the order in which a pass reads them: loaders keep that order in memory."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    kv_layers: tuple[KvLayer, ...]
    n_vocab: int

    def buffer_index(self, name: str) -> int:
        """Index of the (first) buffer of that name; KeyError when there is none."""
        for index, buffer in enumerate(self.buffers):
            if buffer.name == name:
                return index
        raise KeyError(name)
