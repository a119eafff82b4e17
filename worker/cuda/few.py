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
from worker.cuda.matmul_moe import Chosen, Experts

FEW_TOKENS = 32  # most that a launch takes
_BLOCK_COLS = 256
_MAX_WARPS = 8
_RESERVED_BYTES = 8192  # static shared memory of a block and what the driver takes
_RESIDENT_WARPS = {8: 16, 16: 16, 32: 16}  # of a multiprocessor, by token tile: what registers allow


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
        ("slots_of_input", c_int),
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
    passes: int
    warps: int
    stages: int
    blocks: int
    shared_bytes: int

    @property
    def rows(self) -> int:
        """Of an item; with gate and up, of both together."""
        return self.chunk_rows * self.chunks


def token_tile_for(n_tokens: int) -> int:
    """The smallest tile that holds the tokens."""
    return next(tile for tile in (8, 16, 32) if n_tokens <= tile)


def few_cut(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    n_tokens: int,
    n_tiles: int,
    is_gated: bool,
    token_tile: int = 0,
) -> Cut | None:
    """As many rows at once as still give every multiprocessor an item: the more rows, the less often activations are
    read. None when columns are not in whole eights."""
    cols = matrices[0].cols
    if cols % 8 or n_tokens > FEW_TOKENS:
        return None
    tile = token_tile or token_tile_for(n_tokens)
    row_bytes = max(planar_row_bytes(matrix.type_id, _BLOCK_COLS) for matrix in matrices)
    n_rows = sum(matrix.rows for matrix in matrices)
    for chunk_rows, chunks in _row_choices(matrices, tile, is_gated):
        rows = chunk_rows * chunks // (2 if is_gated else 1)
        is_last = (chunk_rows, chunks) == _row_choices(matrices, tile, is_gated)[-1]
        n_items = n_tiles * n_rows / (rows * (2 if is_gated else 1))
        if is_last or n_items >= 0.9 * launcher.sm_count:
            cut = _fitting(launcher, cols, row_bytes, tile, chunk_rows, chunks)
            if cut is not None:
                return cut
    return None


def _row_choices(matrices: Sequence[GpuMatrix], tile: int, is_gated: bool) -> list[tuple[int, int]]:
    if is_gated:
        return [(32, 2)]
    if is_float(matrices[0].type_id):
        return [(16, 1)]
    return [(32, 1), (16, 1)] if tile == 32 else [(32, 2), (32, 1), (16, 1)]


def _fitting(
    launcher: Launcher, cols: int, row_bytes: int, tile: int, chunk_rows: int, chunks: int
) -> Cut | None:
    """Two chunks a warp ahead where there is room for them, fewer warps where there is little."""
    n_blocks = -(-cols // _BLOCK_COLS)
    even = -(-n_blocks // -(-n_blocks // _MAX_WARPS))
    for warps in sorted({even, min(4, even), 1}, reverse=True):
        for stages in (2, 1):
            shared = warps * (tile * (chunk_rows * chunks + 4) * 4 + stages * chunk_rows * row_bytes)
            if shared <= launcher.shared_bytes - _RESERVED_BYTES:
                blocks = max(
                    1,
                    min(_RESIDENT_WARPS[tile] // warps, launcher.shared_bytes // (shared + _RESERVED_BYTES)),
                )
                passes = {8: 1, 16: 2, 32: 4}[tile]
                return Cut(tile, chunk_rows, chunks, passes, warps, stages, blocks, shared)
    return None


def _launch(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    call: _CallStruct,
    cut: Cut,
    n_items: int,
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
        "PASSES": cut.passes,
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
    grid = min(n_items, max(1, resident) * launcher.sm_count)
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
    cut = few_cut(launcher, matrices, n_tokens, 1, is_gated=False)
    if cut is None:
        return False
    n_items = sum(-(-matrix.rows // cut.rows) for matrix in matrices)
    call = _CallStruct(
        codes=source.codes,
        scales=source.scales,
        halves=source.halves,
        n_tokens=n_tokens,
        slots_of_input=1,
        n_items=n_items,
        accumulate=int(epilogue.accumulate),
        scale=epilogue.scale,
        softcap=epilogue.softcap,
    )
    for i, part in enumerate(parts):
        call.parts[i] = _part(part.matrix, part.output, part.output_stride, part.bias)
    _launch(launcher, matrices, call, cut, n_items, pdl=pdl)
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
    """Codes and scales of `hidden` [n_tokens, n_ff] = act(gate x) * (up x) for a dense network that `takes_gated`."""
    cut = few_cut(launcher, [network.gate, network.up], n_tokens, 1, is_gated=True)
    assert cut is not None
    call = _gated_call(network, source, n_tokens, hidden)
    call.n_items = -(-2 * network.gate.rows // cut.rows)
    _launch(
        launcher,
        [network.gate, network.up],
        call,
        cut,
        call.n_items,
        activation=network.activation,
        pdl=pdl,
    )


def _gated_call(experts: Experts, source: Activations, n_tokens: int, hidden: Activations) -> _CallStruct:
    call = _CallStruct(
        codes=source.codes,
        scales=source.scales,
        output_scales=hidden.scales,
        n_tokens=n_tokens,
        slots_of_input=experts.n_used,
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
    tile, n_tiles = mixture_tile(experts, n_tokens), _most_tiles(experts, n_tokens)
    gated = few_cut(launcher, [experts.gate, experts.up], n_tokens, n_tiles, True, tile)
    down = few_cut(launcher, [experts.down], n_tokens, n_tiles, False, tile)
    return (gated, down) if gated and down else None


def _most_tiles(experts: Experts, n_tokens: int) -> int:
    slots, tile = n_tokens * experts.n_used, mixture_tile(experts, n_tokens)
    return min(slots, experts.gate.experts + slots // tile)


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
    cuts, n_tiles = _mixture_cuts(launcher, experts, n_tokens), _most_tiles(experts, n_tokens)
    assert cuts is not None
    call = _gated_call(experts, source, n_tokens, hidden)
    call.ids = choice.ids
    n_items = n_tiles * -(-2 * experts.gate.rows // cuts[0].rows)
    matrices = [experts.gate, experts.up]
    _launch(
        launcher, matrices, call, cuts[0], n_items, experts=experts, activation=experts.activation, pdl=pdl
    )
    down = _CallStruct(
        codes=hidden.codes, scales=hidden.scales, ids=choice.ids, n_tokens=n_tokens, slots_of_input=1
    )
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
