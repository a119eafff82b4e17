"""ModelCard: what a model file is, summed up for people and for the search. No tensor data is read for it.

A card exists for every readable GGUF file, also for architectures that the native engine does not run: then
`units` is empty, `native_reason` says why, and the byte table comes from the names of the tensors.
"""

from __future__ import annotations

import msgspec

from plans.units import AttentionShape, MoeShape, Unit

CARD_VERSION = 1


class KindBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stored bytes of one kind of unit (or, without units, of one group of tensors)."""

    kind: str
    bytes: int
    tensors: int


class TypeBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    bytes: int
    tensors: int
    parameters: int


class KvLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    n_kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int = 0  # 0: sees everything


class ModelCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`native_reason` is None exactly when the native engine runs the model, `tokenizer_reason` when text can be
    turned into its tokens, without which no engine can be measured or served."""

    card_version: int
    name: str
    architecture: str
    paths: tuple[str, ...]
    file_bytes: int
    parameters: int
    n_layers: int | None
    n_embd: int | None
    n_vocab: int | None
    context_length_tokens: int | None
    n_experts: int | None
    n_experts_used: int | None
    tokenizer: str | None
    pre_tokenizer: str | None
    has_chat_template: bool
    types: tuple[TypeBytes, ...]
    kinds: tuple[KindBytes, ...]
    kv_layers: tuple[KvLayer, ...]
    native_reason: str | None
    units: tuple[Unit, ...] = ()
    tokenizer_reason: str | None = None

    @property
    def supported(self) -> bool:
        return self.native_reason is None

    @property
    def kv_elements_per_token(self) -> int:
        """Key and value elements that one token adds over all layers."""
        return sum(layer.n_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.kv_layers)


def kv_layers_of(units: tuple[Unit, ...]) -> tuple[KvLayer, ...]:
    shapes = [unit.shape for unit in units if isinstance(unit.shape, AttentionShape)]
    return tuple(KvLayer(s.n_kv_heads, s.head_dim, s.head_dim, s.window_tokens) for s in shapes)


def active_fraction(unit: Unit, role: str) -> float:
    """The share of a tensor that one decoded token reads: chosen over all experts, else everything."""
    shape = unit.shape
    if isinstance(shape, MoeShape) and role.endswith("_experts"):
        return shape.n_experts_used / shape.n_experts
    return 1.0
