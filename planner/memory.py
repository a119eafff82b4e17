"""How many bytes a placement will take, predicted before anything is allocated, and what is short by how
much.

Weights and KV are exact to a few percent (row padding and wider scales of the packed layout); the workspace
is an upper estimate. Mapped weights are page cache: they need room to be fast, not to start.
"""

from __future__ import annotations

import msgspec

from plans.card import ModelCard
from plans.machine import MachineReport
from plans.placement import NATIVE, PAGE_TOKENS, KvType, Placement
from plans.plan import Limits, MemoryNeed
from plans.units import AttentionShape, FfnShape, MoeShape

KV_BYTES_PER_ELEMENT: dict[KvType, float] = {"f16": 2.0, "q8_0": 34 / 32}
# The packed layout widens the 6-bit scales of these types to bytes and pads rows to 16.
_PACKED_FACTOR = {"Q2_K": 1.05, "Q3_K": 1.05, "Q4_K": 1.03, "Q5_K": 1.03}
_PROCESS_BYTES = 160 << 20  # interpreter, numpy and the library of one worker
_F32_BYTES = 4


def kv_bytes(card: ModelCard, kv_type: KvType, context_length_tokens: int, max_sequences: int) -> int:
    """KV cache of every sequence at full context, in whole pages."""
    pages = -(-context_length_tokens // PAGE_TOKENS) * max_sequences
    return int(pages * PAGE_TOKENS * card.kv_elements_per_token * KV_BYTES_PER_ELEMENT[kv_type])


def weights_bytes(card: ModelCard, engine: str, load_mode: str) -> int:
    """Bytes of weights in RAM. Our packed arena costs a little more than the file."""
    tensors = sum(entry.bytes for entry in card.types)
    if engine != NATIVE or load_mode == "mmap":
        return tensors
    return int(sum(entry.bytes * _PACKED_FACTOR.get(entry.type, 1.01) for entry in card.types))


def _row_floats(card: ModelCard) -> int:
    """Floats that one token occupies in a step's buffers."""
    widest = 4 * (card.n_embd or 4096)
    for unit in card.units:
        shape = unit.shape
        if isinstance(shape, AttentionShape):
            widest = max(widest, (2 * shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim)
        elif isinstance(shape, FfnShape):
            widest = max(widest, 3 * shape.n_ff)
        elif isinstance(shape, MoeShape):
            widest = max(widest, 3 * shape.n_ff_expert * shape.n_experts_used)
    return widest + 4 * (card.n_embd or 4096)


def workspace_bytes(card: ModelCard, ubatch_tokens: int, max_sequences: int) -> int:
    step = ubatch_tokens * _row_floats(card) * _F32_BYTES * 3 // 2  # activations are kept in a second form
    logits = max_sequences * (card.n_vocab or 150_000) * _F32_BYTES
    return _PROCESS_BYTES + step + logits


def host_process_bytes() -> int:
    """A worker without weights and buffers."""
    return _PROCESS_BYTES


def predict_memory(card: ModelCard, placement: Placement) -> MemoryNeed:
    return MemoryNeed(
        weights_bytes=weights_bytes(card, placement.engine, placement.load_mode),
        kv_bytes=placement.kv_budget_bytes,
        workspace_bytes=workspace_bytes(card, placement.ubatch_tokens, placement.max_sequences),
    )


def host_limit_bytes(report: MachineReport, limits: Limits) -> int:
    """What a plan may use of RAM: the user's cap, or what is available less a margin."""
    free = max(0, report.ram_available_bytes - (limits.host_memory_margin_mib << 20))
    cap = limits.host_memory_mib
    return free if cap is None else min(free, cap << 20)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def resident_need(need: MemoryNeed, load_mode: str, storage_streaming: bool) -> MemoryNeed:
    """What must have room in RAM: streamed weights need none of their own."""
    streams = storage_streaming and load_mode == "mmap"
    return msgspec.structs.replace(need, weights_bytes=0) if streams else need


def shortage(resident: MemoryNeed, limit_bytes: int) -> str | None:
    """Why a resident need does not fit, with numbers, or None. The parts make the sum."""
    if resident.total_bytes <= limit_bytes:
        return None
    weights = f"weights {_mib(resident.weights_bytes)}" if resident.weights_bytes else "weights streamed"
    return (
        f"needs {_mib(resident.total_bytes)} of RAM ({weights}, KV {_mib(resident.kv_bytes)}, "
        f"workspace {_mib(resident.workspace_bytes)}), may use {_mib(limit_bytes)}: "
        f"{_mib(resident.total_bytes - limit_bytes)} short"
    )
