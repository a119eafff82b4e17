"""A model card as text and as JSON-ready values."""

from __future__ import annotations

from typing import Any

import msgspec

from plans.card import ModelCard
from plans.show.text import bytes_text, table


def card_builtins(card: ModelCard) -> dict[str, Any]:
    """A card as plain values; a unit is summed up to name, kind, layer, bytes and types."""
    content: dict[str, Any] = msgspec.to_builtins(card)
    content["native_supported"] = card.supported
    content["kv_elements_per_token"] = card.kv_elements_per_token
    content["units"] = [
        {
            "name": unit.name,
            "kind": unit.kind,
            "layer": unit.layer,
            "bytes": unit.bytes,
            "types": sorted({tensor.type for tensor in unit.tensors.values()}),
        }
        for unit in card.units
    ]
    return content


def card_text(card: ModelCard) -> str:
    experts = f", {card.n_experts} experts ({card.n_experts_used} used)" if card.n_experts else ""
    shape = f"{card.n_layers or 'n/a'} layers, width {card.n_embd or 'n/a'}{experts}"
    native = "runs" if card.supported else f"does not run: {card.native_reason}"
    template = "with" if card.has_chat_template else "without"
    tokenizer = f"{card.tokenizer or 'n/a'} ({card.pre_tokenizer or 'n/a'}), {template} chat template"
    if card.tokenizer_reason:
        tokenizer += f"; cannot be used: {card.tokenizer_reason}"
    head = [
        f"{card.name}",
        f"  architecture  {card.architecture}: {shape}",
        f"  parameters    {card.parameters / 1e6:,.1f} M in {bytes_text(card.file_bytes)}, {len(card.paths)} file(s)",
        f"  context       {card.context_length_tokens or 'n/a'} tokens, vocabulary {card.n_vocab or 'n/a'}",
        f"  tokenizer     {tokenizer}",
        f"  KV cache      {bytes_text(2 * card.kv_elements_per_token or None)} a token in f16",
        f"  native        {native}",
    ]
    types = [(entry.type, bytes_text(entry.bytes), str(entry.tensors)) for entry in card.types]
    kinds = [(entry.kind, bytes_text(entry.bytes), str(entry.tensors)) for entry in card.kinds]
    return "\n".join(
        [
            *head,
            "",
            table(("type", "bytes", "tensors"), types),
            "",
            table(("part", "bytes", "tensors"), kinds),
        ]
    )
