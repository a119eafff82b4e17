"""Units: the smallest things that are placed, and the tensors they are made of.

An architecture (`worker/model/archs`) declares its model once, as an ordered tuple of units. Three parties read it:
inspect adds up bytes, search places the units, `worker/ops/lower.py` turns them into operations. Values only, no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

UnitKind = Literal["embedding", "attention", "dense_ffn", "moe_ffn", "head"]
Activation = Literal["silu", "gelu_tanh"]
RopeStyle = Literal["interleaved", "half"]


class TensorRef(msgspec.Struct, frozen=True):
    """One tensor of a model file. `shape` is in GGUF order: `shape[0]` is the contiguous dimension (columns)."""

    name: str
    type: str  # ggml's name: "F32", "Q4_K", ...
    shape: tuple[int, ...]
    bytes: int
    file_index: int  # which file of a split set
    offset_bytes: int  # from the start of that file

    @property
    def columns(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Rows of one matrix; a stack of experts has `shape[2]` such matrices."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def experts(self) -> int:
        return self.shape[2] if len(self.shape) > 2 else 1


class EmbeddingShape(msgspec.Struct, frozen=True, tag="embedding"):
    """Token ids to rows of the residual stream, times `scale`."""

    n_vocab: int
    n_embd: int
    scale: float = 1.0


class AttentionShape(msgspec.Struct, frozen=True, tag="attention"):
    """Grouped-query attention with rotary positions.

    `rope_style`: "interleaved" rotates (0,1),(2,3)...; "half" rotates (i, i + rope_dim/2).
    `inverse_frequencies`: rope_dim/2 values, scaling and per-frequency factors already applied.
    `window_tokens`: 0 = full attention, else a query at position p sees positions > p - window_tokens.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_style: RopeStyle
    inverse_frequencies: tuple[float, ...]
    score_scale: float
    norm_eps: float
    window_tokens: int = 0
    score_softcap: float = 0.0
    rope_magnitude: float = 1.0  # factor on cos and sin (YaRN)


class FfnShape(msgspec.Struct, frozen=True, tag="ffn"):
    n_ff: int
    activation: Activation
    norm_eps: float


class MoeShape(msgspec.Struct, frozen=True, tag="moe"):
    """Routed experts. `normalize`: the weights of the chosen experts are divided by their sum."""

    n_experts: int
    n_experts_used: int
    n_ff_expert: int
    activation: Activation
    norm_eps: float
    gating: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    weights_scale: float = 1.0


class HeadShape(msgspec.Struct, frozen=True, tag="head"):
    """Final norm and projection to logits. A tied head names the embedding's tensor in its role `output`."""

    n_vocab: int
    n_embd: int
    norm_eps: float
    logit_softcap: float = 0.0
    logit_scale: float = 1.0


UnitShape = EmbeddingShape | AttentionShape | FfnShape | MoeShape | HeadShape


class Unit(msgspec.Struct, frozen=True):
    """A placeable part of the model.

    Roles in `tensors`, by kind (those in brackets are optional):
      embedding  token_embd
      attention  norm q k v output [q_bias k_bias v_bias output_bias q_norm k_norm post_norm]
      dense_ffn  norm gate up down [post_norm]
      moe_ffn    norm router gate_experts up_experts down_experts [router_bias post_norm]
      head       norm output
    """

    name: str  # "embedding", "layer.3.attention", "layer.3.ffn", "head"
    kind: UnitKind
    layer: int  # -1 outside of layers
    tensors: dict[str, TensorRef]
    shape: UnitShape

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())
