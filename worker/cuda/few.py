"""Products of 2 to 32 tokens per matrix on tensor cores, weights unpacked on their way: `few.cu`.

Dense matrices, dense networks and mixtures; quantised weights times 8-bit codes, float weights times halves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix, is_float, planar_row_bytes
from worker.cuda.matmul import Activations, Epilogue, Part
from worker.cuda.matmul_moe import Chosen, Experts, most_tiles

FEW_TOKENS = 32  # most that a launch takes
_BLOCK_COLS = 256
_MAX_WARPS = 8
_NEARLY_ONE = 0.9  # items of a multiprocessor
_DRIVER_BYTES = 1024  # of shared memory, for each block
_RESIDENT_WARPS = {8: 16, 16: 8}  # of a multiprocessor, by token tile: what registers allow


class _PartStruct(ctypes.Structure):
    _fields_ = [
        ("weights", c_uint64),
        ("expert_bytes", c_uint64),
        ("output", c_uint64),
        ("bias", c_uint64),
        ("rows", c_int),
        ("output_stride", c_int),
    ]


class _CallStruct(ctypes.Structure):
    _fields_ = [
        ("parts", _PartStruct * 3),
        ("codes", c_uint64),
        ("scales", c_uint64),
        ("halves", c_uint64),
        ("ids", c_uint64),
        ("output_scales", c_uint64),
        ("n_tokens", c_int),
        ("n_items", c_int),
        ("accumulate", c_int),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Cut(msgspec.Struct, frozen=True):
    """How a launch of few.cu is cut, in the words of its definitions."""

    token_tile: int
    chunk_rows: int
    chunks: int
    warps: int
    stages: int
    blocks: int
    shared_bytes: int

    @property
    def rows(self) -> int:
        """Of an item; with gate and up, of both together."""
        return self.chunk_rows * self.chunks


def token_tile_for(n_tokens: int) -> int:
    """The smallest tile that holds the tokens, at most 16."""
    return 8 if n_tokens <= 8 else 16


def few_cut(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    n_tokens: int,
    n_tiles: int,
    is_gated: bool,
    experts: Experts | None = None,
) -> Cut | None:
    """As many rows at once as still give every multiprocessor an item: the more rows, the less often activations are
    read and turned into halves. None when columns are not in whole eights."""
    if matrices[0].cols % 8 or n_tokens > FEW_TOKENS:
        return None
    tile = mixture_tile(experts, n_tokens) if experts else token_tile_for(n_tokens)
    static_bytes = _slots_bytes(experts) if experts else 64
    n_rows = n_tiles * sum(matrix.rows for matrix in matrices)
    for chunk_rows, chunks, items_of_each in _row_choices(matrices, is_gated):
        n_items = -(-n_rows // (chunk_rows * chunks))
        if n_items >= items_of_each * launcher.sm_count:
            cut = _fitting(launcher, matrices, tile, chunk_rows, chunks, n_items, static_bytes)
            if cut is not None:
                return cut
    return None


def _row_choices(matrices: Sequence[GpuMatrix], is_gated: bool) -> list[tuple[int, int, float]]:
    """(rows of a chunk, chunks of an item, items that there must be of each multiprocessor), best first; measured.
    Chunks are small where there are many warps to have some."""
    if is_float(matrices[0].type_id):
        return [(16, 1, 0)]
    if _has_block_of_its_own(-(-matrices[0].cols // _BLOCK_COLS)):
        return [(16, 4, 0)] if is_gated else [(16, n, _NEARLY_ONE) for n in (4, 3, 2)] + [(16, 1, 0)]
    if is_gated:
        return [(32, 4, 4), (32, 2, 0)]
    return [(32, 4, 4), (32, 2, _NEARLY_ONE), (32, 1, _NEARLY_ONE), (16, 1, 0)]


def _has_block_of_its_own(n_blocks: int) -> bool:
    """Whether more warps than usual are worth it, because then each has one block of columns and keeps its inputs."""
    return _MAX_WARPS < n_blocks <= 2 * _MAX_WARPS


def _slots_bytes(experts: Experts) -> int:
    """`SlotTiles` of slots.cuh."""
    return 64 + 4 * experts.gate.experts + 16 * FEW_TOKENS * experts.n_used


def _fitting(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    tile: int,
    chunk_rows: int,
    chunks: int,
    n_items: int,
    static_bytes: int,
) -> Cut | None:
    """A chunk ahead where there is room for it, fewer warps where there is little."""
    row_bytes = max(planar_row_bytes(matrix.type_id, _BLOCK_COLS) for matrix in matrices)
    input_bytes = 2 * _BLOCK_COLS if is_float(matrices[0].type_id) else _BLOCK_COLS + _BLOCK_COLS // 8
    n_blocks = -(-matrices[0].cols // _BLOCK_COLS)
    even = n_blocks if _has_block_of_its_own(n_blocks) else -(-n_blocks // -(-n_blocks // _MAX_WARPS))
    for warps in sorted({even, min(8, even), min(4, even), 1}, reverse=True):
        # a warp that has one chunk in all has none to be ahead with
        has_one = warps == n_blocks and chunks == 1 and n_items < 2 * launcher.sm_count
        for stages in (1,) if has_one else (2, 1):
            inputs = tile * input_bytes * (1 if chunks >= stages else 2)
            sums = tile * (chunk_rows * chunks + 4) * 4
            shared = warps * (sums + stages * chunk_rows * row_bytes + inputs)
            block_bytes = shared + static_bytes + _DRIVER_BYTES
            fitting = (launcher.shared_bytes + _DRIVER_BYTES) // block_bytes
            if fitting:
                blocks = max(1, min(_RESIDENT_WARPS[tile] // warps, fitting))
                return Cut(tile, chunk_rows, chunks, warps, stages, blocks, shared)
    return None


def _launch(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    call: _CallStruct,
    cut: Cut,
    n_items: int,
    n_tiles: int = 1,
    *,
    experts: Experts | None = None,
    activation: int | None = None,
    early: bool = False,
    pdl: bool = True,
) -> None:
    defines: dict[str, int | float | str] = {
        "COLS": matrices[0].cols,
        "TOKEN_TILE": cut.token_tile,
        "CHUNK_ROWS": cut.chunk_rows,
        "CHUNKS": cut.chunks,
        "WARPS": cut.warps,
        "STAGES": cut.stages,
        "RESIDENT": cut.blocks,
        "N_EXPERTS": experts.gate.experts if experts else 1,
        "N_USED": experts.n_used if experts else 1,
        "EARLY": int(early),
        "GLU": int(activation is not None),
        "ACTIVATION": activation or 0,
        **{f"TYPE_{i}": matrix.type_id for i, matrix in enumerate(matrices)},
    }
    function = launcher.function("few.cu", "few_tokens", defines)
    resident = function.blocks_per_sm(cut.warps * 32, cut.shared_bytes)
    most = max(1, resident) * launcher.sm_count
    grid = min(n_items, most - most % n_tiles)  # a block of a dense product keeps to one tile of tokens
    launcher.launch(function, grid, cut.warps * 32, cut.shared_bytes, (call,), pdl)


def multiply_few(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    epilogue: Epilogue,
    pdl: bool = True,
) -> bool:
    """Up to three matrices of one input, all float or all quantised, in a launch; False when they do not fit and
    nothing was enqueued. Reads codes and scales of `source`, or its halves for float weights."""
    matrices = [part.matrix for part in parts]
    n_tiles = -(-n_tokens // token_tile_for(n_tokens))
    cut = few_cut(launcher, matrices, n_tokens, n_tiles, is_gated=False)
    if cut is None:
        return False
    n_items = n_tiles * sum(-(-matrix.rows // cut.rows) for matrix in matrices)
    call = _CallStruct(
        codes=source.codes,
        scales=source.scales,
        halves=source.halves,
        n_tokens=n_tokens,
        n_items=n_items,
        accumulate=int(epilogue.accumulate),
        scale=epilogue.scale,
        softcap=epilogue.softcap,
    )
    for i, part in enumerate(parts):
        call.parts[i] = _part(part.matrix, part.output, part.output_stride, part.bias)
    _launch(launcher, matrices, call, cut, n_items, n_tiles, pdl=pdl)
    return True


def _part(matrix: GpuMatrix, output: int, stride: int, bias: int = 0) -> _PartStruct:
    return _PartStruct(matrix.pointer, matrix.expert_bytes, output, bias, matrix.rows, stride)


def multiply_gated(
    launcher: Launcher,
    network: Experts,
    source: Activations,
    n_tokens: int,
    hidden: Activations,
    pdl: bool = True,
) -> None:
    """Codes and scales of `hidden` [n_tokens, n_ff] = act(gate x) * (up x), for a dense network that fits."""
    n_tiles = -(-n_tokens // token_tile_for(n_tokens))
    cut = few_cut(launcher, [network.gate, network.up], n_tokens, n_tiles, is_gated=True)
    assert cut is not None
    call = _gated_call(network, source, n_tokens, hidden)
    call.n_items = n_tiles * -(-2 * network.gate.rows // cut.rows)
    _launch(
        launcher,
        [network.gate, network.up],
        call,
        cut,
        call.n_items,
        n_tiles,
        activation=network.activation,
        pdl=pdl,
    )


def _gated_call(experts: Experts, source: Activations, n_tokens: int, hidden: Activations) -> _CallStruct:
    call = _CallStruct(
        codes=source.codes,
        scales=source.scales,
        output_scales=hidden.scales,
        n_tokens=n_tokens,
    )
    call.parts[0] = _part(experts.gate, hidden.codes, experts.gate.rows)
    call.parts[1] = _part(experts.up, hidden.codes, experts.up.rows)
    return call


def mixture_tile(experts: Experts, n_tokens: int) -> int:
    """Room for twice the mean number of tokens of an expert that is chosen at all, so that most have one tile."""
    mean = n_tokens * experts.n_used / experts.gate.experts
    return 8 if mean <= 4 else token_tile_for(n_tokens)


def takes_mixture(launcher: Launcher, experts: Experts, n_tokens: int) -> bool:
    """Whether `moe_few` can do a mixture for so many tokens."""
    matrices = (experts.gate, experts.up, experts.down)
    if n_tokens > FEW_TOKENS or any(is_float(matrix.type_id) for matrix in matrices):
        return False
    return _mixture_cuts(launcher, experts, n_tokens) is not None


def _mixture_cuts(launcher: Launcher, experts: Experts, n_tokens: int) -> tuple[Cut, Cut] | None:
    n_tiles = _mixture_tiles(experts, n_tokens)
    gated = few_cut(launcher, [experts.gate, experts.up], n_tokens, n_tiles, True, experts)
    down = few_cut(launcher, [experts.down], n_tokens, n_tiles, False, experts)
    return (gated, down) if gated and down else None


def _mixture_tiles(experts: Experts, n_tokens: int) -> int:
    return most_tiles(experts, n_tokens, mixture_tile(experts, n_tokens))


def moe_few(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen,
    source: Activations,
    n_tokens: int,
    output: int,
    hidden: Activations,
    rows: int,
    *,
    accumulate: bool,
    pdl: bool = True,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= the mixture of `source` (codes). Scratch: `hidden` codes and scales
    [slots, n_ff], `rows` f32 [slots, n_embd]."""
    cuts, n_tiles = _mixture_cuts(launcher, experts, n_tokens), _mixture_tiles(experts, n_tokens)
    assert cuts is not None
    call = _gated_call(experts, source, n_tokens, hidden)
    call.ids = choice.ids
    n_items = n_tiles * -(-2 * experts.gate.rows // cuts[0].rows)
    matrices = [experts.gate, experts.up]
    _launch(
        launcher, matrices, call, cuts[0], n_items, experts=experts, activation=experts.activation, pdl=pdl
    )
    down = _CallStruct(codes=hidden.codes, scales=hidden.scales, ids=choice.ids, n_tokens=n_tokens)
    down.parts[0] = _part(experts.down, rows, experts.down.rows)
    n_items = n_tiles * -(-experts.down.rows // cuts[1].rows)
    _launch(launcher, [experts.down], down, cuts[1], n_items, experts=experts, early=True, pdl=pdl)
    combine(launcher, experts, choice, n_tokens, rows, 0, output, accumulate, pdl)


def combine(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen,
    n_tokens: int,
    rows: int,
    position_of: int,
    output: int,
    accumulate: bool,
    pdl: bool = True,
) -> None:
    """output f32 [n_tokens, n_embd] (+)= the weighted sum of each token's `rows`, in the order of its choice."""
    n_embd = experts.down.rows
    function = launcher.function("group.cu", "combine")
    args = (rows, position_of, choice.weights, output)
    sizes = (c_int(experts.n_used), c_int(n_embd), c_int(int(accumulate)))
    threads = 256 if n_tokens > FEW_TOKENS else 64
    launcher.launch(function, (-(-n_embd // (4 * threads)), n_tokens), threads, 0, (*args, *sizes), pdl)
