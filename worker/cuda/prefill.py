"""Dense matrices times more than a few tokens: tensor-core kernels with weights unpacked inside, or halves and cuBLAS.

All take halves of the activations, all sum in f32. few.cu runs as fast as weights arrive, mma.cu shares the unpacking
among more tokens, cuBLAS is faster where unpacking the whole matrix first is shared by many.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_uint64
from typing import Protocol

from worker.cuda.driver import Launcher
from worker.cuda.few import (
    FEW_TOKENS,
    MatrixCallStruct,
    few_tiling,
    launch_few,
    part_call,
    token_tile_for,
)
from worker.cuda.formats import GpuMatrix, is_float
from worker.cuda.matmul import Epilogue, Part

CUBLAS_TOKENS = 64  # from here on; below, reading the weights once is what counts
_ROW_TILE = 128
_LINE_BYTES = 256  # 128 columns of halves
_F16 = 1


class Blas(Protocol):
    """A cuBLAS handle on the launcher's stream; `worker.cuda.blas.CuBlas` outside of tests."""

    def matrix_product(
        self,
        weights: int,
        weights_stride: int,
        inputs: int,
        output: int,
        output_stride: int,
        shape: tuple[int, int, int],
        scale: float,
        accumulate: bool,
    ) -> None: ...


def to_halves(launcher: Launcher, values: int, halves: int, n: int) -> None:
    """f32 [n] to f16, clamped to its range; n is a multiple of 4."""
    function = launcher.function("halves.cu", "to_halves")
    launcher.launch(function, -(-n // 1024), 256, 0, (values, halves, c_uint64(n)), True)


def weights_to_halves(launcher: Launcher, matrix: GpuMatrix, halves: int) -> None:
    """One matrix as f16 [rows, cols]."""
    defines = {"WEIGHT_TYPE": matrix.type_id, "COLS": matrix.cols}
    function = launcher.function("halves.cu", "weights_to_halves", defines)
    n_threads = matrix.rows * -(-matrix.cols // 64) * 4
    args = (matrix.pointer, halves, c_uint64(matrix.rows))
    launcher.launch(function, -(-n_threads // 256), 256, 0, args, True)


def buffers_for(launcher: Launcher, token_tile: int) -> int:
    """Two buffers where shared memory allows, so that copies run beside the products."""
    return 2 if 2 * (token_tile + _ROW_TILE) * _LINE_BYTES + 2048 <= launcher.shared_bytes else 1


def launch_matrix_matrix(
    launcher: Launcher,
    first: GpuMatrix,
    second: GpuMatrix,
    call: MatrixCallStruct,
    *,
    token_tile: int,
    n_tiles: int,
    activation: int | None = None,
) -> None:
    """Enqueue few.cu or mma.cu; with `activation` first is gate and second up, and the output is in halves."""
    if token_tile <= FEW_TOKENS:
        is_gated = activation is not None
        matrices = [first, second] if is_gated else [first]
        tiling = few_tiling(launcher, matrices, token_tile, n_tiles, is_gated)
        if tiling is not None:
            launch_few(
                launcher,
                matrices,
                [call],
                tiling,
                token_tile=token_tile,
                n_tiles=n_tiles,
                activation=activation,
            )
            return
    buffers = buffers_for(launcher, token_tile)
    defines = {
        "COLS": first.cols,
        "TYPE_0": first.type_id,
        "TYPE_1": second.type_id,
        "TOKEN_TILE": token_tile,
        "BUFFERS": buffers,
        "GLU": int(activation is not None),
        "ACTIVATION": activation or 0,
    }
    function = launcher.function("mma.cu", "matrix_matrix", defines)
    rows_of_block = _ROW_TILE if activation is None else _ROW_TILE // 2
    shared = buffers * (token_tile + _ROW_TILE) * _LINE_BYTES
    launcher.launch(function, (-(-first.rows // rows_of_block), n_tiles), 256, shared, (call,), True)


def multiply_in_kernel(
    launcher: Launcher, part: Part, halves: int, n_tokens: int, epilogue: Epilogue
) -> None:
    """output (+)= W x on tensor cores, weights unpacked on the way; halves f16 [n_tokens, cols], cols % 8 == 0."""
    matrix, tile = part.matrix, token_tile_for(n_tokens)
    call = part_call(part, halves, n_tokens, epilogue)
    launch_matrix_matrix(launcher, matrix, matrix, call, token_tile=tile, n_tiles=-(-n_tokens // tile))


def multiply_with_blas(
    launcher: Launcher,
    blas: Blas,
    part: Part,
    halves: int,
    n_tokens: int,
    epilogue: Epilogue,
    matrix_halves: int,
) -> None:
    """output (+)= W x by cuBLAS; `matrix_halves` takes rows * cols halves."""
    matrix = part.matrix
    weights, stride = matrix_halves, matrix.cols
    if matrix.type_id == _F16:
        weights, stride = matrix.pointer, matrix.row_bytes // 2
    else:
        weights_to_halves(launcher, matrix, matrix_halves)
    assert not (epilogue.accumulate and epilogue.softcap), "a capped product can not be accumulated"
    if not launcher.is_recording:
        blas.matrix_product(
            weights,
            stride,
            halves,
            part.output,
            part.output_stride,
            (n_tokens, matrix.rows, matrix.cols),
            epilogue.scale or 1.0,
            epilogue.accumulate,
        )
    if part.bias or epilogue.softcap:
        function = launcher.function("halves.cu", "add_bias")
        args = (
            part.output,
            part.bias,
            c_float(epilogue.softcap),
            c_int(matrix.rows),
            c_int(part.output_stride),
        )
        launcher.launch(function, (-(-matrix.rows // 256), n_tokens), 256, 0, args)


def matrix_halves_bytes(matrix: GpuMatrix) -> int:
    """What `multiply_with_blas` needs beside the activations."""
    return 0 if matrix.type_id == _F16 else matrix.rows * matrix.cols * 2


def can_use_tensor_cores(matrix: GpuMatrix) -> bool:
    """Rows of odd width are left to the matrix-vector kernel."""
    return matrix.cols % 8 == 0 if is_float(matrix.type_id) else True
