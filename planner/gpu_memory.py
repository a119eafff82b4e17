"""How many bytes layers take of a GPU, predicted as the worker will: weights, cache, buffers of a step, context.

Weights and cache are exact but for rounding, so that a capped card is filled to within a layer. The worker predicts
again before it allocates (`worker/cuda/model.py`), and tests hold the two against each other.
"""

from __future__ import annotations

import msgspec

from planner.memory import KV_BYTES_PER_ELEMENT
from plans.card import ModelCard
from plans.placement import PAGE_TOKENS, KvType
from plans.plan import MemoryNeed
from plans.units import MoeShape, TensorRef, Unit

MIB = 1 << 20
CONTEXT_BYTES = 640 * MIB  # driver, cuBLAS, kernels
LIBRARIES_BYTES = 112 * MIB  # of it, what comes after the context
GRAPH_BYTES = 2 * MIB
UPLOAD_BYTES = 24 * MIB  # raw buffers while weights are uploaded, which lie where keys and values will be
_PASSING_BUFFERS, _PASSING_PART_BYTES = 8, 4 * MIB  # raw ones, of weights that pass through
_SMALL_BUFFERS_BYTES = 4 * MIB  # counters, metadata, rounding
_PLANAR_FACTOR = {"Q3_K": 114 / 110}  # other types keep their size
_ALIGNMENT_BYTES = 256  # of every tensor
_UNIT_WEIGHTS = 64  # rows of quantised weights are filled up to this
_VALUE_BYTES = 4.0
_SOURCE_BYTES = 6.125  # of a value that matrices multiply: f32, a code, its share of a scale, a sum
_MOST_HALVES_BYTES = 256 * MIB  # the largest matrix that is unpacked to f16 for prefill


class StepSizes(msgspec.Struct, frozen=True):
    """What cache and steps have room for. One of the `cached_sequences` more than run at a time keeps prefixes of
    sequences that ended.
    """

    kv_type: KvType
    context_length_tokens: int
    max_sequences: int
    cached_sequences: int
    ubatch_tokens: int


class DeviceUse(msgspec.Struct, frozen=True):
    """Layers [first, end) on one GPU, and whether embedding and head are there too. The first `n_passing` layers of the
    model stay in RAM and pass through it for larger steps.
    """

    ordinal: int
    first: int
    end: int
    has_embedding: bool
    has_head: bool
    n_passing: int = 0

    @property
    def n_layers(self) -> int:
        return self.end - self.first

    def holds(self, unit: Unit) -> bool:
        if unit.layer >= 0:
            return self.first <= unit.layer < self.end
        return self.has_embedding if unit.kind == "embedding" else self.has_head

    def lets_pass(self, unit: Unit) -> bool:
        return 0 <= unit.layer < self.n_passing


def distinct_tensors(units: list[Unit]) -> list[TensorRef]:
    return list({tensor.name: tensor for unit in units for tensor in unit.tensors.values()}.values())


def device_need(card: ModelCard, use: DeviceUse, sizes: StepSizes) -> MemoryNeed:
    """Bytes of one device, an upper estimate within a few percent of what the worker takes."""
    units = [unit for unit in card.units if use.holds(unit)]
    guests = [unit for unit in card.units if use.lets_pass(unit)]
    kv = _kv_bytes(card, use.n_layers + min(1, use.n_passing), sizes)
    graphs = _n_graphs(sizes.context_length_tokens, sizes.max_sequences) * GRAPH_BYTES
    return MemoryNeed(
        weights_bytes=_weights_bytes(card, units, use) + _guest_bytes(card, guests, sizes),
        kv_bytes=kv,
        workspace_bytes=_workspace_bytes(card, [*units, *guests], use, sizes) + _raw_bytes(guests),
        context_bytes=CONTEXT_BYTES + max(graphs, 0 if kv >= UPLOAD_BYTES else UPLOAD_BYTES),
    )


def _weights_bytes(card: ModelCard, units: list[Unit], use: DeviceUse) -> int:
    tensors = distinct_tensors(units)
    total = sum(map(_laid_out_bytes, tensors))
    is_tied = use.has_embedding and use.has_head and len(tensors) < sum(len(unit.tensors) for unit in units)
    if is_tied:  # rows for the lookup stay beside the matrix of the head
        total += next(unit.bytes for unit in units if unit.kind == "embedding")
    rotations = use.n_layers * 4 * (card.n_embd or 4096)  # constants of the layers, at most as wide
    return total + rotations


def _guest_bytes(card: ModelCard, guests: list[Unit], sizes: StepSizes) -> int:
    """The place that layers pass through, their vectors, and rows of the embedding."""
    layers: dict[int, int] = {}
    vectors = 0
    for unit in guests:
        for tensor in unit.tensors.values():
            if len(tensor.shape) == 1:
                vectors += _laid_out_bytes(tensor) + 4 * (card.n_embd or 4096)  # rotations are no wider
            else:
                layers[unit.layer] = layers.get(unit.layer, 0) + _laid_out_bytes(tensor)
    table = next((tensor for unit in card.units for tensor in unit.tensors.values()), None)
    rows = sizes.ubatch_tokens * table.bytes // table.rows if table is not None and guests else 0
    return max(layers.values(), default=0) + vectors + rows


def _raw_bytes(guests: list[Unit]) -> int:
    largest = max((tensor.bytes for unit in guests for tensor in unit.tensors.values()), default=0)
    return _PASSING_BUFFERS * (min(_PASSING_PART_BYTES, largest) + _ALIGNMENT_BYTES) if guests else 0


def _laid_out_bytes(tensor: TensorRef) -> int:
    """Rows are filled up to whole units and 16 bytes, vectors become f32."""
    if len(tensor.shape) == 1:
        return 4 * tensor.columns + _ALIGNMENT_BYTES
    n_rows, columns = tensor.rows * tensor.experts, tensor.columns
    row_bytes = tensor.bytes / n_rows * _PLANAR_FACTOR.get(tensor.type, 1.0)
    if columns % _UNIT_WEIGHTS:
        row_bytes *= -(-columns // _UNIT_WEIGHTS) * _UNIT_WEIGHTS / columns
    return n_rows * 16 * -(-int(row_bytes + 0.5) // 16) + _ALIGNMENT_BYTES


def _kv_bytes(card: ModelCard, n_layers: int, sizes: StepSizes) -> int:
    """Pages for full contexts, and one that takes what nobody wants."""
    pages = -(-sizes.context_length_tokens // PAGE_TOKENS) * sizes.cached_sequences + 1
    share = n_layers / max(1, len(card.kv_layers))
    elements = pages * PAGE_TOKENS * card.kv_elements_per_token * share
    return int(elements * KV_BYTES_PER_ELEMENT[sizes.kv_type]) + 4 * _ALIGNMENT_BYTES * n_layers


def _n_graphs(context_length_tokens: int, max_sequences: int) -> int:
    """At most: one for each power of two of sequences and of contexts from 1,024 on, greedy or not, and as many for the
    steps that are queued behind others."""
    buckets = (min(max_sequences, 32) - 1).bit_length() + 1
    classes = (max(context_length_tokens, 1024) - 1).bit_length() - 9
    return 2 * 2 * buckets * classes


def _workspace_bytes(card: ModelCard, units: list[Unit], use: DeviceUse, sizes: StepSizes) -> int:
    tokens, max_sequences = max(sizes.ubatch_tokens, 32), sizes.max_sequences
    outputs = max(16, 1 << (max(1, min(max_sequences, 32)) - 1).bit_length(), max_sequences)
    size = tokens * _token_bytes(card, units)
    if use.has_head:
        n_vocab = card.n_vocab or 150_000
        size += outputs * (12 * n_vocab + 16 * (card.n_embd or 4096)) + MIB
    size += max((_scratch_bytes(unit, tokens) for unit in units), default=0)
    size += _folded_router_bytes(card, units)  # of those that pass too, though theirs are never folded
    tables = 4 * (max_sequences + 40) * (sizes.context_length_tokens // PAGE_TOKENS + 2)
    return int(size) + _SMALL_BUFFERS_BYTES + tables


def _token_bytes(card: ModelCard, units: list[Unit]) -> float:
    """Buffers of a step, for one of its tokens."""
    width = card.n_embd or 4096
    sizes = {"residual": _VALUE_BYTES * width, "normed": _SOURCE_BYTES * width}
    for unit in units:
        for role, tensor in unit.tensors.items():
            if role in ("q", "k", "v", "gate", "up"):
                per_value = _SOURCE_BYTES if role == "gate" else _VALUE_BYTES
                sizes[role] = max(sizes.get(role, 0.0), per_value * tensor.rows)
            if role == "q":
                sizes["attended"] = max(sizes.get("attended", 0.0), _SOURCE_BYTES * tensor.rows)
            if role == "post_norm":
                sizes["projected"] = _VALUE_BYTES * width
    return sum(sizes.values())


def _folded_router_bytes(card: ModelCard, units: list[Unit]) -> int:
    """Rows of routers that run inside of attention's projection: halves, as wide as its input and the residual."""
    heads = max((unit.tensors["q"].rows for unit in units if "q" in unit.tensors), default=0)
    routed = (unit.shape.n_experts for unit in units if isinstance(unit.shape, MoeShape))
    return 2 * sum(routed) * (heads + (card.n_embd or 4096))


def _scratch_bytes(unit: Unit, tokens: int) -> float:
    """What the largest product of a unit wants beside its inputs and outputs."""
    if isinstance(unit.shape, MoeShape):
        width = unit.tensors["down_experts"].rows
        slots = tokens * unit.shape.n_experts_used
        sorted_rows = slots * (2 * unit.shape.n_ff_expert + 4 * width + 16) + 2 * tokens * width
        return sorted_rows + 4 * tokens * unit.shape.n_experts
    matrices = [tensor for tensor in unit.tensors.values() if len(tensor.shape) == 2]
    halves = [size for t in matrices if (size := 2 * t.rows * t.columns) <= _MOST_HALVES_BYTES]
    return max(halves, default=0) + 2 * tokens * max((t.columns for t in matrices), default=0)
