"""Attention on the GPU: rotary positions with the write into the paged KV cache, split-KV decode, flash prefill.

Keys and values of a layer are f16 [page][kv_head][32][head_dim], 16-byte units of a row in the order of kv_rows.cuh; as
q8_0 they are int8 codes of that shape with f16 scales [page][kv_head][32][head_dim / 32]. Device pointers are plain
integers; nothing is allocated here.
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

c_int, c_float = ctypes.c_int32, ctypes.c_float


class _RopeCall(ctypes.Structure):
    """`Rope` of rope.cuh."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("key", "value", "q_norm", "k_norm", "inverse_frequencies")),
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
    return _RopeCall(*pointers, rope.eps, rope.magnitude)


def _rope_defines(rope: Rope) -> dict[str, int]:
    norms = int(bool(rope.q_norm)) + 2 * int(bool(rope.k_norm))
    return {"ROPE_DIM": rope.rope_dim, "ROPE_STYLE": rope.style, "NORMS": norms}


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
    function = launcher.function("rope.cu", "rope_store", _defines(heads, kv) | _rope_defines(rope))
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

    `n_splits` blocks share the positions of a kv head, `cluster` of them (1, 2, 4 or 8) as a cluster;
    `heads_per_block` query heads (at most 16, 8 of more than 128 values) share their loads; each of `n_warps` (2 or
    more) has `n_stages` tiles of 16 positions in shared memory or under way.
    """

    n_splits: int
    heads_per_block: int
    n_warps: int
    n_stages: int
    cluster: int = 1


_TILE = 16
_MAX_SPLITS = 64
_COUNTERS = 16384
COUNTER_BYTES = 4 * _COUNTERS
_SMALLER = ((4, 2), (4, 1), (2, 1))  # warps and stages where a card has less shared memory


def plan_decode(launcher: Launcher, heads: Heads, n_rows: int, context_tokens: int) -> DecodePlan:
    """A plan for `n_rows` sequences of up to `context_tokens`: correct for any context, fast for these."""
    heads_per_block = min(heads.group, 16 if heads.head_dim <= 128 else 8)
    groups = n_rows * heads.n_kv_heads * -(-heads.group // heads_per_block)
    if launcher.capability >= 90:
        n_splits, cluster, *preferred = _clustered_cut(launcher.sm_count, groups, context_tokens)
    else:
        room = max(1, 2 * launcher.sm_count // groups)
        n_splits, cluster, *preferred = min(room, -(-context_tokens // 128), _MAX_SPLITS), 1, 4, 2
    for n_warps, n_stages in ((preferred[0], preferred[1]), *_SMALLER):
        plan = DecodePlan(n_splits, heads_per_block, n_warps, n_stages, cluster)
        if all(decode_fits(launcher, heads, plan, is_q8=is_q8) for is_q8 in (False, True)):
            return plan
    raise EngineError(
        f"heads of {heads.head_dim} values do not fit into {launcher.shared_bytes} bytes of shared memory"
    )


def _clustered_cut(sm_count: int, groups: int, context_tokens: int) -> tuple[int, int, int, int]:
    """Splits, cluster, warps and stages for `groups` of heads that share keys: the best of what was tried in the decode
    graphs of two models on an H200. Blocks with little shared memory begin beside the kernel in front.
    """
    if context_tokens <= 1024 and groups > 8:
        cluster = _power_of_two(min(8, max(1, sm_count // 2 // groups)))
        return cluster, cluster, 8, 2
    if context_tokens <= 2048 and groups <= 8:
        n_warps, n_stages = (4, 3) if context_tokens > 1024 else (8, 1) if groups <= 4 else (4, 1)
        return 8, 8, n_warps, n_stages
    n_stages = 2 if context_tokens <= 8192 else 3
    if groups > 4:  # one block a multiprocessor, in pairs
        pairs = min(sm_count // groups, _MAX_SPLITS) // 2
        return (2 * pairs, 2, 8, n_stages) if pairs else (1, 1, 8, n_stages)
    if context_tokens <= 4096:
        return 8, 8, 8, 2
    splits = min(sm_count * 17 // 10 // groups, _MAX_SPLITS)  # two blocks a multiprocessor, not everywhere
    return max(8, splits // 8 * 8), 8, 4, n_stages


def _power_of_two(value: int) -> int:
    """The largest that is not above `value`."""
    return 1 << (value.bit_length() - 1)


def _shared_bytes(heads: Heads, plan: DecodePlan, is_q8: bool) -> int:
    """The tiles of all warps, as decode_tiles.cuh lays them out; at the end the sums of a warp take their place."""
    halves = 2 * _TILE * _row_bytes(heads)
    codes = 2 * _TILE * (heads.head_dim + heads.head_dim // 16)
    tiles = plan.n_stages * codes + halves if is_q8 else plan.n_stages * halves
    sums = -(-4 * plan.heads_per_block * (heads.head_dim + 4) // 128) * 128
    return plan.n_warps * max(tiles, sums)


def decode_fits(launcher: Launcher, heads: Heads, plan: DecodePlan, *, is_q8: bool) -> bool:
    """Whether the card's shared memory holds a block of this plan: its tiles, queries, and what a cluster exchanges."""
    rows, dim = plan.heads_per_block, heads.head_dim
    fixed = 2 * -(-rows // 8) * 8 * (dim + 8) + 16 * dim + 8 * rows * plan.n_warps
    if plan.cluster > 1:
        fixed += 4 * (rows * dim + 32 * plan.cluster) + 8 * rows * plan.cluster
    return _shared_bytes(heads, plan, is_q8) + fixed <= launcher.shared_bytes


def _row_bytes(heads: Heads) -> int:
    """A key or value in shared memory, f16."""
    return 2 * heads.head_dim


def partial_bytes(heads: Heads, plan: DecodePlan, n_rows: int) -> int:
    """What the clusters of `n_rows` rows leave for each other."""
    blocks = n_rows * heads.n_kv_heads * -(-heads.group // plan.heads_per_block)
    return 4 * blocks * (plan.n_splits // plan.cluster) * plan.heads_per_block * (heads.head_dim + 2)


def decode_workspace_bytes(launcher: Launcher, heads: Heads, max_rows: int) -> int:
    """Scratch for any plan of up to `max_rows` rows; it has to be zeroed once, before the first call."""
    plans = [
        (rows, plan_decode(launcher, heads, rows, 1024 << doublings))
        for rows in range(1, max_rows + 1)
        for doublings in range(11)
    ]
    return COUNTER_BYTES + max(partial_bytes(heads, plan, rows) for rows, plan in plans)


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
    and written. The contexts come from the device; the grid depends on `plan` alone. One launch: the last cluster of a
    group merges the others, always in the same order. With `pdl`, the arrays of `step`, and with `fresh` the cache of
    all positions but the rows' own, have to be complete before the first kernel of the chain: they are read ahead.
    """
    heads.check(is_q8=kv.is_q8)
    outputs.check(heads.head_dim)
    head_blocks = -(-heads.group // plan.heads_per_block)
    groups = -(-plan.heads_per_block * heads.head_dim // 32)
    if n_rows * heads.n_kv_heads * head_blocks * groups > _COUNTERS:
        raise EngineError(f"decode attention of {n_rows} sequences at once: use fewer")
    call = _DecodeCall(
        query,
        (ctypes.c_uint64 * 4)(*kv.arguments()),
        (ctypes.c_uint64 * 3)(step.positions, step.sequence_of_token, step.page_tables),
        workspace + COUNTER_BYTES,
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
    defines = _defines(heads, kv) | {"FUSED": int(fresh is not None)}
    defines |= _rope_defines(fresh.rope) if fresh is not None else {}
    defines |= {"HEADS": plan.heads_per_block, "WARPS": plan.n_warps, "STAGES": plan.n_stages}
    defines |= {"CLUSTER": plan.cluster}
    function = launcher.function("attention_decode.cu", "attention_decode", defines)
    grid = (plan.n_splits, heads.n_kv_heads * head_blocks, n_rows)
    shared_bytes = _shared_bytes(heads, plan, kv.is_q8)
    launcher.launch(function, grid, 32 * plan.n_warps, shared_bytes, (call,), pdl, plan.cluster)


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
