"""Attention on the GPU: rotary positions with the write into the paged KV cache, split-KV decode, flash prefill.

Keys and values of a layer are f16 [page][kv_head][32][head_dim]; as q8_0 they are int8 codes of that shape with f16
scales [page][kv_head][32][head_dim / 32]. Device pointers are plain integers; nothing is allocated here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineError
from worker.cuda.attention_values import FreshHeads, Heads, KvPointers, Rope, Scores, StepPointers
from worker.cuda.driver import Launcher
from worker.cuda.ops import Outputs
from worker.ops.batch import PAGE_TOKENS

SHORT_CONTEXT_TOKENS = 2048
"""Above this many visible positions decode attention runs on tensor cores (measured on an H200)."""

c_int, c_float = ctypes.c_int32, ctypes.c_float


class _RopeCall(ctypes.Structure):
    """`Rope` of rope.cuh."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("key", "value", "q_norm", "k_norm", "inverse_frequencies")),
        ("rope_dim", c_int),
        ("style", c_int),
        ("eps", c_float),
        ("magnitude", c_float),
    ]


class _DecodeCall(ctypes.Structure):
    """`DecodeCall` of decode.cuh."""

    _fields_ = [
        ("query", ctypes.c_uint64),
        ("kv", ctypes.c_uint64 * 4),
        ("step", ctypes.c_uint64 * 3),
        ("partials", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("outputs", ctypes.c_uint64 * 5),
        ("rope", _RopeCall),
        ("n_heads", c_int),
        ("n_kv_heads", c_int),
        ("max_pages", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("cap", c_float),
    ]


class _PrefillCall(ctypes.Structure):
    """`PrefillCall` of attention_prefill.cu."""

    _fields_ = [
        ("query", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("kv", ctypes.c_uint64 * 4),
        ("page_tables", ctypes.c_uint64),
        ("out_values", ctypes.c_uint64),
        ("out_halves", ctypes.c_uint64),
        ("n_heads", c_int),
        ("n_kv_heads", c_int),
        ("max_pages", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("cap", c_float),
    ]


def _rope_call(rope: Rope, heads: Heads, key: int, value: int) -> _RopeCall:
    if rope.rope_dim > heads.head_dim or rope.rope_dim % 2:
        raise EngineError(f"{rope.rope_dim} rotated dimensions in heads of {heads.head_dim}")
    pointers = (key, value, rope.q_norm, rope.k_norm, rope.inverse_frequencies)
    return _RopeCall(*pointers, rope.rope_dim, rope.style, rope.eps, rope.magnitude)


def rope_store(
    launcher: Launcher,
    query: int,
    key: int,
    value: int,
    n_tokens: int,
    heads: Heads,
    rope: Rope,
    kv: KvPointers,
    step: StepPointers,
    *,
    pdl: bool = False,
) -> None:
    """Norm and rotate query f32 [n_tokens, n_heads * head_dim] in place; norm and rotate key, write key and value
    f32 [n_tokens, n_kv_heads * head_dim] into the cache (key and value stay as they are). One launch.
    """
    heads.check(is_q8=kv.is_q8)
    function = launcher.function("rope.cu", "rope_store", _defines(heads, kv))
    all_heads = heads.n_heads + 2 * heads.n_kv_heads
    args = (
        query,
        _rope_call(rope, heads, key, value),
        c_int(heads.n_heads),
        c_int(heads.n_kv_heads),
        *kv.arguments(),
        *step.arguments(),
    )
    launcher.launch(function, (-(-all_heads // 4), n_tokens), 128, 0, args, pdl)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one decode launch is cut: fixed when a graph is captured, right for every context up to the page table's end.

    `tensor_cores`: the form for long contexts; `n_splits` blocks share the positions of a kv head; `heads_per_block`
    query heads share its loads; `n_warps` per block, each with `n_stages` pages under way (tensor cores only).
    """

    tensor_cores: bool
    n_splits: int
    heads_per_block: int
    n_warps: int
    n_stages: int = 1
    is_cluster: bool = (
        False  # the splits are the blocks of a cluster (or there is one split): 1, 2, 4 or 8 of them
    )


_MAX_SPLITS = 64
_SHORT_BLOCKS_PER_SM, _LONG_BLOCKS_PER_SM = 2, 1
_MAX_CLUSTER = 8  # what every card with clusters can place
_COUNTERS = 16384
_STATIC_SHARED_BYTES = 24 * 1024  # at most, of 16 heads of 256 values
_PAGES_IN_SHARED = ((4, 2), (4, 1), (2, 1), (1, 1))
"""Warps and stages of the tensor-core form, best first: the first that fits is taken."""


def plan_decode(launcher: Launcher, heads: Heads, n_rows: int, context_tokens: int) -> DecodePlan:
    """A plan for `n_rows` sequences of about `context_tokens`: correct for any context, fast for this one."""
    tensor_cores = context_tokens > SHORT_CONTEXT_TOKENS
    if tensor_cores:
        heads_per_block = min(heads.group, 16)
        n_warps, n_stages = _pages_in_shared(launcher, heads)
        pages_per_split = 2 * n_warps
    else:
        heads_per_block, n_warps, n_stages = (2 if heads.group % 2 == 0 else 1), 8, 1
        pages_per_split = 2
    pages = max(1, -(-context_tokens // PAGE_TOKENS))
    blocks = n_rows * heads.n_kv_heads * -(-heads.group // heads_per_block)
    wanted = max(1, -(-pages // pages_per_split))
    blocks_per_sm = _LONG_BLOCKS_PER_SM if tensor_cores else _SHORT_BLOCKS_PER_SM
    room = max(1, blocks_per_sm * launcher.sm_count // blocks)
    n_splits = min(wanted, room, _MAX_SPLITS)
    can_cluster = launcher.capability >= 90 and not tensor_cores
    if can_cluster and n_splits > 1:
        n_splits = min(_MAX_CLUSTER, 1 << (n_splits.bit_length() - 1))
    is_cluster = can_cluster or n_splits == 1
    return DecodePlan(tensor_cores, n_splits, heads_per_block, n_warps, n_stages, is_cluster)


def _pages_in_shared(launcher: Launcher, heads: Heads) -> tuple[int, int]:
    for n_warps, n_stages in _PAGES_IN_SHARED:
        has_copies = launcher.capability >= 80 or n_stages == 1
        plan = DecodePlan(True, 1, min(heads.group, 16), n_warps, n_stages)
        if has_copies and _long_shared_bytes(heads, plan) + _STATIC_SHARED_BYTES <= launcher.shared_bytes:
            return n_warps, n_stages
    raise EngineError(
        f"heads of {heads.head_dim} values do not fit into {launcher.shared_bytes} bytes of shared memory"
    )


def _long_shared_bytes(heads: Heads, plan: DecodePlan) -> int:
    """The pages of all warps; at the end the same memory takes the sums and masses of the warps."""
    pages = plan.n_warps * plan.n_stages * 2 * PAGE_TOKENS * _row_bytes(heads)
    sums = plan.n_warps * plan.heads_per_block * (4 * (heads.head_dim + 4) + 8)
    return max(pages, sums)


def _row_bytes(heads: Heads) -> int:
    """A key or value in shared memory: f16 and 16 bytes between rows."""
    return 2 * (heads.head_dim + 8)


def decode_workspace_bytes(launcher: Launcher, heads: Heads, max_rows: int) -> int:
    """Scratch for any plan of up to `max_rows` rows; it has to be zeroed once, before the first call."""
    largest = 0
    for rows in range(1, max_rows + 1):
        for context in (SHORT_CONTEXT_TOKENS, 1 << 20):
            largest = max(largest, rows * plan_decode(launcher, heads, rows, context).n_splits)
    return 4 * _COUNTERS + 4 * largest * heads.n_heads * (heads.head_dim + 2)


def decode_attention(
    launcher: Launcher,
    query: int,
    n_rows: int,
    heads: Heads,
    kv: KvPointers,
    step: StepPointers,
    scores: Scores,
    plan: DecodePlan,
    workspace: int,
    outputs: Outputs,
    *,
    fresh: FreshHeads | None = None,
    pdl: bool = False,
) -> None:
    """Attention of one token per row (query f32 [n_rows, n_heads * head_dim]) over positions 0..its own.

    Without `fresh` the query is rotated and the row's own key and value are in the cache; with it they are made here
    and written. The contexts come from the device; the grid depends on `plan` alone. One launch: the last block of a
    group merges the splits, always in the same order. With `pdl`, the arrays of `step`, and all pages but those of
    the rows' own positions, have to be complete before the first kernel of the chain: they are read ahead.
    """
    heads.check(is_q8=kv.is_q8)
    outputs.check(heads.head_dim)
    head_blocks = -(-heads.group // plan.heads_per_block)
    if n_rows * heads.n_kv_heads * head_blocks > _COUNTERS:
        raise EngineError(f"decode attention of {n_rows} sequences at once: use fewer")
    call = _DecodeCall(
        query,
        (ctypes.c_uint64 * 4)(*kv.arguments()),
        (ctypes.c_uint64 * 3)(step.positions, step.sequence_of_token, step.page_tables),
        workspace + 4 * _COUNTERS,
        workspace,
        (ctypes.c_uint64 * 5)(*outputs.arguments()),
        _RopeCall() if fresh is None else _rope_call(fresh.rope, heads, fresh.key, fresh.value),
        heads.n_heads,
        heads.n_kv_heads,
        step.max_pages,
        scores.window,
        scores.scale,
        scores.cap,
    )
    defines = _defines(heads, kv)
    defines |= {"HEADS": plan.heads_per_block, "WARPS": plan.n_warps, "FUSED": int(fresh is not None)}
    defines |= {"CLUSTER": plan.n_splits if plan.is_cluster else 0}
    cluster = max(1, defines["CLUSTER"])
    grid = (plan.n_splits, heads.n_kv_heads * head_blocks, n_rows)
    if plan.tensor_cores:
        defines |= {"STAGES": plan.n_stages}
        function = launcher.function("attention_decode_long.cu", "attention_decode_long", defines)
        shared_bytes = _long_shared_bytes(heads, plan)
        launcher.launch(function, grid, 32 * plan.n_warps, shared_bytes, (call,), pdl, cluster)
    else:
        function = launcher.function("attention_decode.cu", "attention_decode", defines)
        launcher.launch(function, grid, 32 * plan.n_warps, 0, (call,), pdl, cluster)


def prefill_tile_rows(heads: Heads) -> int:
    """Query tokens that one block of `prefill_attention` takes."""
    return 64


def prefill_tiles(
    sequence_first: NDArray[np.int32], positions: NDArray[np.int32], rows_per_tile: int
) -> NDArray[np.int32]:
    """The tiles of a batch, i32 [n_tiles, 4]: first row, rows, sequence, position of the first row.

    Tiles with the longest contexts come first, so that the last blocks to start are short.
    """
    tiles = []
    for sequence in range(len(sequence_first) - 1):
        begin, end = int(sequence_first[sequence]), int(sequence_first[sequence + 1])
        for first in range(begin, end, rows_per_tile):
            tiles.append((first, min(rows_per_tile, end - first), sequence, int(positions[first])))
    tiles.sort(key=lambda tile: -(tile[1] + tile[3]))
    return np.array(tiles, np.int32).reshape(-1, 4)


def prefill_attention(
    launcher: Launcher,
    query: int,
    tiles: int,
    n_tiles: int,
    heads: Heads,
    kv: KvPointers,
    step: StepPointers,
    scores: Scores,
    outputs: Outputs,
    *,
    pdl: bool = False,
) -> None:
    """Causal attention of the tokens of `tiles` (device copy of `prefill_tiles`) over their sequences' positions in
    the cache, their own included. query (rotated) f32 [n_tokens, n_heads * head_dim]; outputs.values and .halves only.
    """
    heads.check(is_q8=kv.is_q8)
    if outputs.codes:
        raise EngineError("prefill attention writes f32 and f16 only")
    rows = prefill_tile_rows(heads)
    n_stages = _prefill_stages(launcher, heads)
    defines = _defines(heads, kv) | {"TILE_ROWS": rows, "STAGES": n_stages}
    function = launcher.function("attention_prefill.cu", "attention_prefill", defines)
    call = _PrefillCall(
        query,
        tiles,
        (ctypes.c_uint64 * 4)(*kv.arguments()),
        step.page_tables,
        outputs.values,
        outputs.halves,
        heads.n_heads,
        heads.n_kv_heads,
        step.max_pages,
        scores.window,
        scores.scale,
        scores.cap,
    )
    shared_bytes = n_stages * _prefill_stage_bytes(heads)
    launcher.launch(function, (heads.n_heads, n_tiles), 2 * rows, shared_bytes, (call,), pdl)


def _prefill_stage_bytes(heads: Heads) -> int:
    positions = 32 if heads.head_dim > 128 else 64
    return 2 * positions * _row_bytes(heads)


def _prefill_stages(launcher: Launcher, heads: Heads) -> int:
    fits = 2 * _prefill_stage_bytes(heads) <= launcher.shared_bytes
    return 2 if launcher.capability >= 80 and fits else 1


def _defines(heads: Heads, kv: KvPointers) -> dict[str, int]:
    return {"HEAD_DIM": heads.head_dim, "KV_Q8": int(kv.is_q8)}
