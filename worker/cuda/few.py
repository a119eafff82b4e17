"""Products of 2 to 32 tokens per matrix on tensor cores, weights unpacked on their way: `few.cu`.

Also what its relatives share: the description of a call (`MatrixCall` of matrix_call.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix
from worker.cuda.matmul import Epilogue, Part

FEW_TOKENS = 32  # most that a launch takes of one matrix
_BEYOND_THE_GRID = 0x7FFFFFFF
_STATIC_SHARED_BYTES = 2048


class MatrixCallStruct(ctypes.Structure):
    """`MatrixCall` of matrix_call.cuh."""

    _fields_ = [
        ("weights", c_uint64 * 2),
        ("expert_bytes", c_uint64 * 2),
        ("input", c_uint64),
        ("input_rows", c_uint64),
        ("tiles", c_uint64),
        ("output", c_uint64),
        ("bias", c_uint64),
        ("input_divisor", c_int),
        ("n_tokens", c_int),
        ("rows", c_int),
        ("output_stride", c_int),
        ("accumulate", c_int),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class _FewStruct(ctypes.Structure):
    _fields_ = [("parts", MatrixCallStruct * 3), ("first_block", c_int * 3)]


class FewTiling(msgspec.Struct, frozen=True):
    """How few.cu is cut: groups of 8 rows and warps of a block."""

    row_groups: int
    warps: int
    shared_bytes: int


def part_call(part: Part, halves: int, n_tokens: int, epilogue: Epilogue) -> MatrixCallStruct:
    """A dense matrix times halves f16 [n_tokens, cols]."""
    call = MatrixCallStruct(
        input=halves,
        output=part.output,
        bias=part.bias,
        input_divisor=1,
        n_tokens=n_tokens,
        rows=part.matrix.rows,
        output_stride=part.output_stride,
        accumulate=int(epilogue.accumulate),
        scale=epilogue.scale,
        softcap=epilogue.softcap,
    )
    call.weights[0] = call.weights[1] = part.matrix.pointer
    return call


def few_tiling(
    launcher: Launcher, matrices: Sequence[GpuMatrix], token_tile: int, n_tiles: int, is_gated: bool
) -> FewTiling | None:
    """As many rows as fit twice into shared memory and still give every multiprocessor a block: the more rows, the
    less often activations are read. None when not even eight rows fit, or columns are not in whole eights."""
    cols = matrices[0].cols
    if cols % 8:
        return None
    stride = max(matrix.row_bytes for matrix in matrices) + 16
    warps = 8 if cols > 4 * 256 else 4  # they share out blocks of 256 columns
    budget = launcher.shared_bytes - _STATIC_SHARED_BYTES
    choices = [
        (groups, max(8 * groups * stride, warps * (token_tile // 16) * groups * 512))
        for groups in ((4, 2) if is_gated else (4, 2, 1))
    ]
    fitting = [(groups, shared) for groups, shared in choices if shared <= budget]
    if not fitting:
        return None
    n_rows = sum(matrix.rows for matrix in matrices)
    for groups, shared in fitting:
        if 2 * shared <= budget and -(-n_rows // (8 * groups)) * n_tiles >= launcher.sm_count:
            return FewTiling(groups, warps, shared)
    groups, shared = fitting[0] if 2 * fitting[-1][1] > budget else fitting[-1]
    return FewTiling(groups, warps, shared)


def launch_few(
    launcher: Launcher,
    matrices: Sequence[GpuMatrix],
    calls: Sequence[MatrixCallStruct],
    tiling: FewTiling,
    *,
    token_tile: int,
    n_tiles: int,
    activation: int | None = None,
) -> None:
    """Enqueue few.cu: a call per matrix; or, with `activation`, one call of gate and up, whose output is in halves."""
    is_gated = activation is not None
    defines = {
        "COLS": matrices[0].cols,
        "TOKEN_TILE": token_tile,
        "N_TILES": tiling.row_groups,
        "WARPS": tiling.warps,
        "MIXTURE": int(calls[0].tiles != 0),
        "GLU": int(is_gated),
        "ACTIVATION": activation or 0,
        **{f"TYPE_{i}": matrix.type_id for i, matrix in enumerate(matrices)},
    }
    defines.setdefault("TYPE_1", matrices[0].type_id)
    function = launcher.function("few.cu", "few_tokens", defines)
    rows_of_block = tiling.row_groups * (4 if is_gated else 8)
    few = _FewStruct()
    few.first_block[:] = [0, _BEYOND_THE_GRID, _BEYOND_THE_GRID]
    n_blocks = 0
    for i, call in enumerate(calls):
        few.parts[i], few.first_block[i] = call, n_blocks
        n_blocks += -(-call.rows // rows_of_block)
    launcher.launch(function, (n_blocks, n_tiles), tiling.warps * 32, tiling.shared_bytes, (few,), True)


def token_tile_for(n_tokens: int) -> int:
    """The smallest tile that holds the tokens, at most 64."""
    return next((tile for tile in (16, 32, 64) if n_tokens <= tile), 64)


def multiply_few(
    launcher: Launcher, parts: Sequence[Part], halves: int, n_tokens: int, epilogue: Epilogue
) -> bool:
    """Up to three matrices of one input in a launch; False when they do not fit and nothing was enqueued."""
    if n_tokens > FEW_TOKENS or len(parts) > 3:
        return False
    tile, matrices = token_tile_for(n_tokens), [part.matrix for part in parts]
    tiling = few_tiling(launcher, matrices, tile, 1, is_gated=False)
    if tiling is None:
        return False
    calls = [part_call(part, halves, n_tokens, epilogue) for part in parts]
    launch_few(launcher, matrices, calls, tiling, token_tile=tile, n_tiles=1)
    return True


def multiply_gated(
    launcher: Launcher,
    gate: GpuMatrix,
    up: GpuMatrix,
    halves: int,
    n_tokens: int,
    hidden: int,
    activation: int,
) -> bool:
    """hidden f16 [n_tokens, rows] = act(gate x) * (up x) for a dense network; False as for `multiply_few`."""
    tile = token_tile_for(n_tokens)
    tiling = few_tiling(launcher, [gate, up], tile, 1, is_gated=True) if n_tokens <= FEW_TOKENS else None
    if tiling is None:
        return False
    call = part_call(Part(gate, hidden, gate.rows), halves, n_tokens, Epilogue())
    call.weights[1] = up.pointer
    launch_few(launcher, [gate, up], [call], tiling, token_tile=tile, n_tiles=1, activation=activation)
    return True
