"""A router inside of the product in front of it, for one token: its rows made at load, its place in a call.

The product y = r + W a (attention's output projection) is what the router multiplies, after a norm. With R, the
router times the norm's weights, its logits are (R r + (R W) a) / rms(y): R and R W are computed once (`fold_router`),
the product's kernel makes the logits on the side, and the mixture divides by the rms where it matters. One launch a
layer less. R and R W are rounded to halves, a to 8 bits, as it is without folding.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint64

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix, is_float

_EXPERTS_PER_BLOCK = 64  # EXPERTS of router_fold.cu
ROUTER_WARPS = 4  # of gemv.cu, beside those that multiply
MOST_ROWS_PER_BLOCK = 8  # router rows that a block of the product takes


class FoldedRouter(msgspec.Struct, frozen=True):
    """Router rows f16 [n_experts, W.cols + W.rows] at `rows`."""

    rows: int
    n_experts: int


class RouterCall(msgspec.Struct, frozen=True):
    """What a product with a router needs: the row f32 [W.rows] it adds to, and where logits f32 [n_experts] go."""

    router: FoldedRouter
    residual: int
    logits: int


class _FoldedStruct(ctypes.Structure):
    _fields_ = [("rows", c_uint64), ("residual", c_uint64), ("logits", c_uint64), ("n_experts", c_int)]


def folded_struct(call: RouterCall | None) -> _FoldedStruct:
    if call is None:
        return _FoldedStruct()
    return _FoldedStruct(call.router.rows, call.residual, call.logits, call.router.n_experts)


def folded_bytes(matrix: GpuMatrix, n_experts: int) -> int:
    """Device memory of the rows of a folded router of n_experts."""
    return 2 * n_experts * (matrix.cols + matrix.rows)


def can_fold(matrix: GpuMatrix, router: GpuMatrix, sm_count: int) -> bool:
    return (
        not is_float(matrix.type_id)
        and is_float(router.type_id)
        and matrix.rows % 8 == 0
        and -(-router.rows // min(sm_count, matrix.rows)) <= MOST_ROWS_PER_BLOCK
    )


def fold_router(
    launcher: Launcher, folded: FoldedRouter, matrix: GpuMatrix, router: GpuMatrix, norm: int
) -> None:
    """Enqueue the rows of `folded`; norm f32 [matrix.rows], router [experts, matrix.rows]."""
    assert router.cols == matrix.rows
    defines = {"WEIGHT_TYPE": matrix.type_id, "COLS": matrix.cols, "ROUTER_TYPE": router.type_id}
    function = launcher.function("router_fold.cu", "fold_router", defines)
    grid = (-(-matrix.cols // 64), -(-router.rows // _EXPERTS_PER_BLOCK))
    args = (matrix.pointer, router.pointer, norm, folded.rows, c_int(matrix.rows), c_int(router.rows))
    launcher.launch(function, grid, 256, 0, args)
