"""Matrix-vector products on the device: up to three matrices of one input, 1 to GEMV_TOKENS tokens in a launch.

`source` is an `Activations`: the f32 rows and, for quantised weights, their 8-bit codes. With `norm` the kernel
normalises and quantises `source.values` itself; with `codes == 0` it quantises. That is meant for one token, where
it saves launches. All pointers are device addresses as plain ints; all calls only enqueue; nothing is allocated.
`linear.py` is what an executor calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix, is_float, planar_row_bytes
from worker.cuda.router_fold import ROUTER_WARPS, RouterCall, _FoldedStruct, folded_struct

GEMV_TOKENS = 16
_QUANTISED, _PLAIN, _NORMED = 0, 1, 2  # PROLOGUE of the kernels
_MAX_WARPS = 16
_LONG_ROW_BYTES = 2048  # beyond, a warp has enough to do with a row that more of them pay
_RESERVED_SHARED_BYTES = 4096  # static shared memory of a block and what the driver takes


class Activations(msgspec.Struct, frozen=True):
    """Rows of one input, in the forms that there are (0: there is none): `values` f32 [tokens, cols]; codes int8
    [tokens, cols] with scales and sums f32 [tokens, cols / 32]; `halves` f16 [tokens, cols]."""

    values: int
    codes: int = 0
    scales: int = 0
    sums: int = 0
    halves: int = 0


class Norm(msgspec.Struct, frozen=True):
    """An RMS norm that a kernel applies to its input: weights f32 [cols]."""

    weights: int
    epsilon: float


class Part(msgspec.Struct, frozen=True):
    """One matrix of a launch: output f32 [tokens, output_stride], bias f32 [rows] or 0. `residual`: what an
    accumulating launch adds to, where that is not the output itself."""

    matrix: GpuMatrix
    output: int
    output_stride: int
    bias: int = 0
    residual: int = 0


class Epilogue(msgspec.Struct, frozen=True):
    """y = softcap(scale * Wx + bias), added to the output or stored; 0 means none."""

    accumulate: bool = False
    scale: float = 0.0
    softcap: float = 0.0


STORE = Epilogue()


class _PartStruct(ctypes.Structure):
    _fields_ = [
        ("weights", c_uint64),
        ("output", c_uint64),
        ("residual", c_uint64),
        ("bias", c_uint64),
        ("rows", c_int),
        ("output_stride", c_int),
    ]


class _CallStruct(ctypes.Structure):
    _fields_ = [
        ("parts", _PartStruct * 3),
        ("codes", c_uint64),
        ("scales", c_uint64),
        ("sums", c_uint64),
        ("values", c_uint64),
        ("norm", c_uint64),
        ("norm_epsilon", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("router", _FoldedStruct),
    ]


class Tiling(msgspec.Struct, frozen=True):
    """How a matrix-vector kernel is cut: warps of a block, stages of a warp's ring, rows per stage."""

    warps: int
    stages: int
    rows: int
    shared_bytes: int
    blocks: int


def token_bytes(cols: int, float_weights: bool) -> int:
    """Shared memory of one token's activations (activations.cuh)."""
    return -(-cols // 8) * 32 if float_weights else -(-cols // 64) * 80


def choose_tiling(
    launcher: Launcher,
    n_rows: int,
    row_bytes: int,
    activation_bytes: int,
    rows: int,
    n_tokens: int,
    warps_divide: int = 0,
) -> Tiling | None:
    """Enough warps to have a small matrix in flight at once, rings for the rest; None when so many tokens do not fit.

    Two blocks should fit on a multiprocessor, so that a kernel can start while the one in front ends. `warps_divide`:
    warps times rows have to divide this number (0: anything goes).
    """
    budget = launcher.shared_bytes - _RESERVED_SHARED_BYTES
    if n_tokens == 1 and (
        tiling := _in_flight_at_once(launcher, n_rows, row_bytes, activation_bytes, warps_divide)
    ):
        return tiling
    shared_half = budget // 2 - 1024
    options = [(shared_half, (16, 8)), (budget, (16, 8)), (shared_half, (4,)), (budget, (4,))]
    if n_tokens == 1:
        options.append((budget, (2, 1)))
        if warps_divide:  # a dense network's first half, which is long enough to want all there is
            options.insert(0, (budget, (16,)))
    for limit, warp_counts in options:
        for n in sorted({rows, 1}, reverse=True):
            groups = -(-n_rows // n)
            per_sm = -(-groups // launcher.sm_count)
            wanted = min(_MAX_WARPS, max(4, -(-per_sm // 4) * 4))
            for warps in sorted({min(wanted, count) for count in warp_counts}, reverse=True):
                if warps_divide % (warps * n):
                    continue
                stages = min(4, max(1, -(-per_sm // warps)))
                fitting = (limit - activation_bytes) // (warps * n * row_bytes)
                if fitting >= min(stages, 2):
                    used = min(stages, fitting)
                    shared = activation_bytes + warps * used * n * row_bytes
                    per_block = 2 if limit == shared_half and per_sm > 4 * warps else 1
                    return Tiling(warps, used, n, shared, min(groups, launcher.sm_count * per_block))
    return None


def _in_flight_at_once(
    launcher: Launcher, n_rows: int, row_bytes: int, activation_bytes: int, warps_divide: int
) -> Tiling | None:
    """One block a multiprocessor whose warps ask for all of its rows, two at a time, before they multiply any; few
    warps with few registers leave room for the kernel behind. None for what is too long for that.
    """
    per_sm = -(-n_rows // launcher.sm_count)
    rows = 2 if per_sm > 4 else 1
    most = 16 if row_bytes > _LONG_ROW_BYTES else 12
    for stages in (1, 2, 3):
        warps = max(4, -(-per_sm // (rows * stages)))
        if warps_divide and warps <= warps_divide // rows:
            warps = warps_divide // rows
        shared = activation_bytes + warps * stages * rows * row_bytes
        fits = shared <= launcher.shared_bytes - _RESERVED_SHARED_BYTES
        if warps <= most and fits and not warps_divide % (warps * rows):
            return Tiling(warps, stages, rows, shared, min(-(-n_rows // rows), launcher.sm_count))
    return None


def gemv(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    *,
    norm: Norm | None = None,
    epilogue: Epilogue = STORE,
    router: RouterCall | None = None,
    pdl: bool = True,
) -> None:
    """Enqueue y_j = W_j x for 1..GEMV_TOKENS tokens; matrices of float and of quantised types go separately.
    `router`: one that rides along, for one token, one quantised matrix and an input with codes."""
    floats = [part for part in parts if is_float(part.matrix.type_id)]
    for group in (floats, [part for part in parts if part not in floats]):
        if group:
            _gemv_group(launcher, group, source, n_tokens, norm, epilogue, pdl, router)


def _gemv_group(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    norm: Norm | None,
    epilogue: Epilogue,
    pdl: bool,
    router: RouterCall | None = None,
) -> None:
    cols = parts[0].matrix.cols
    assert 1 <= len(parts) <= 3 and all(part.matrix.cols == cols for part in parts)
    floats = is_float(parts[0].matrix.type_id)
    row_bytes = max(planar_row_bytes(part.matrix.type_id, cols) for part in parts)
    n_rows = sum(part.matrix.rows for part in parts)
    tiling = choose_tiling(
        launcher,
        n_rows,
        row_bytes,
        n_tokens * token_bytes(cols, floats),
        _rows_at_once(launcher, n_rows, n_tokens),
        n_tokens,
    )
    if tiling is None or n_tokens > GEMV_TOKENS:
        _split_tokens(launcher, parts, source, n_tokens, norm, epilogue, pdl)
        return
    prologue = _NORMED if norm else _QUANTISED if source.codes and not floats else _PLAIN
    defines = {
        "COLS": cols,
        "TOKENS": n_tokens,
        "N_PARTS": len(parts),
        "WARPS": tiling.warps,
        "STAGES": tiling.stages,
        "ROWS": tiling.rows,
        "PROLOGUE": prologue,
        "HAS_BIAS": int(any(part.bias for part in parts)),
        "HAS_SCALE": int(epilogue.scale != 0 or epilogue.softcap != 0),
        **{f"TYPE_{i}": part.matrix.type_id for i, part in enumerate(parts)},
    }
    if router:
        assert n_tokens == 1 and prologue == _QUANTISED
        rows_per_block = -(-router.router.n_experts // tiling.blocks)
        defines |= {"ROUTER_ROWS": rows_per_block, "ROUTER_COLS": parts[0].matrix.rows}
    threads = 32 * (tiling.warps + (ROUTER_WARPS if router else 0))
    function = launcher.function("gemv.cu", "gemv", defines)
    call = _call_struct(parts, source, norm, epilogue, router)
    launcher.launch(function, tiling.blocks, threads, tiling.shared_bytes, (call,), pdl)


def _rows_at_once(launcher: Launcher, n_rows: int, n_tokens: int) -> int:
    """Several tokens share what a row's unpacking costs; long matrices want longer copies."""
    if n_tokens > 16:
        return 1
    return 2 if n_tokens > 1 or n_rows > launcher.sm_count * _MAX_WARPS * 4 else 1


def _split_tokens(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    norm: Norm | None,
    epilogue: Epilogue,
    pdl: bool,
) -> None:
    """Two launches of half the tokens, where the activations of all do not fit."""
    assert n_tokens > 1, f"a row of {parts[0].matrix.cols} columns does not fit into shared memory"
    first = n_tokens // 2
    for start, count in ((0, first), (first, n_tokens - first)):
        moved = [_at_token(part, start) for part in parts]
        _gemv_group(
            launcher, moved, rows_from(source, start, parts[0].matrix.cols), count, norm, epilogue, pdl
        )


def _at_token(part: Part, token: int) -> Part:
    moved = token * part.output_stride * 4
    residual = part.residual and part.residual + moved
    return msgspec.structs.replace(part, output=part.output + moved, residual=residual)


def rows_from(source: Activations, token: int, cols: int) -> Activations:
    """The same activations from row `token` on."""
    if not source.codes:
        return Activations(source.values + token * cols * 4)
    groups = token * (cols // 32) * 4
    return Activations(
        source.values + token * cols * 4 if source.values else 0,
        source.codes + token * cols,
        source.scales + groups,
        source.sums + groups,
    )


def _call_struct(
    parts: Sequence[Part],
    source: Activations,
    norm: Norm | None,
    epilogue: Epilogue,
    router: RouterCall | None,
) -> _CallStruct:
    call = _CallStruct(
        codes=source.codes,
        scales=source.scales,
        sums=source.sums,
        values=source.values,
        norm=norm.weights if norm else 0,
        norm_epsilon=norm.epsilon if norm else 0.0,
        scale=epilogue.scale,
        softcap=epilogue.softcap,
        router=folded_struct(router),
    )
    for i, part in enumerate(parts):
        matrix, residual = part.matrix, (part.residual or part.output) if epilogue.accumulate else 0
        call.parts[i] = _PartStruct(
            matrix.pointer, part.output, residual, part.bias, matrix.rows, part.output_stride
        )
    return call


def quantise(
    launcher: Launcher, values: int, n_tokens: int, cols: int, target: Activations, pdl: bool = True
) -> None:
    """f32 [n_tokens, cols] (cols a multiple of 32) to the codes, scales and sums of `target`."""
    function = launcher.function("quantise.cu", "quantise")
    n_groups = n_tokens * (cols // 32)
    args = (values, target.codes, target.scales, target.sums, c_int(n_groups))
    launcher.launch(function, -(-n_groups // 32), 256, 0, args, pdl)
