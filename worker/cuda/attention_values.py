"""What attention on the GPU is described by: heads, cache, step, rope, scores; frozen values with device pointers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from configs.errors import EngineError
from worker.cuda.ops import GROUP
from worker.ops.oplist import AttentionInts, OpKind, OpList, RopeStoreInts

HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class Heads:
    """`n_heads` query heads share `n_kv_heads` key/value heads of `head_dim` values."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, ints: RopeStoreInts | AttentionInts) -> Heads:
        return cls(ints.n_heads, ints.n_kv_heads, ints.head_dim)

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.n_heads // self.n_kv_heads

    def check(self, *, is_q8: bool) -> None:
        if self.head_dim not in HEAD_DIMS or self.n_heads % self.n_kv_heads:
            raise EngineError(
                f"attention with {self.n_heads} heads over {self.n_kv_heads} of {self.head_dim} values: "
                f"the GPU kernels do head sizes {', '.join(map(str, HEAD_DIMS))} and whole groups"
            )
        if is_q8 and self.head_dim % GROUP:
            raise EngineError(f"a q8_0 KV cache needs heads of a multiple of {GROUP}, not {self.head_dim}")


def attention_heads(oplist: OpList) -> set[Heads]:
    """Of all layers; most models have one kind."""
    return {Heads.of(AttentionInts(*op.ints)) for op in oplist.ops if op.kind == OpKind.ATTENTION}


@dataclass(frozen=True, slots=True)
class KvPointers:
    """One layer of the cache; the scales are 0 in f16."""

    keys: int
    values: int
    key_scales: int = 0
    value_scales: int = 0

    @property
    def is_q8(self) -> bool:
        return bool(self.key_scales)

    def arguments(self) -> tuple[int, ...]:
        return (self.keys, self.values, self.key_scales, self.value_scales)


@dataclass(frozen=True, slots=True)
class StepPointers:
    """`positions`, `sequence_of_token`: i32 [n_tokens]; `page_tables`: i32 [sequences][max_pages] of page ids."""

    positions: int
    sequence_of_token: int
    page_tables: int
    max_pages: int

    def arguments(self) -> tuple[object, ...]:
        return (self.positions, self.sequence_of_token, self.page_tables, ctypes.c_int32(self.max_pages))


@dataclass(frozen=True, slots=True)
class Rope:
    """`q_norm`, `k_norm`: f32 [head_dim] or 0; `inverse_frequencies`: f32 [rope_dim / 2]; style 0 interleaved,
    1 half.
    """

    q_norm: int
    k_norm: int
    inverse_frequencies: int
    rope_dim: int
    style: int
    eps: float
    magnitude: float


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made: times `scale`, then soft-capped at `cap` (0: not); `window` positions are seen (0: all)."""

    scale: float
    cap: float = 0.0
    window: int = 0


@dataclass(frozen=True, slots=True)
class FreshHeads:
    """Queries, keys and values as the projections left them: decode attention then does what `rope_store` does."""

    rope: Rope
    key: int  # f32 [n_rows, n_kv_heads * head_dim]
    value: int
