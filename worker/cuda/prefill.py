"""Dense matrices times more than a few tokens: tensor-core kernels with weights unpacked inside, or halves and cuBLAS.

All take halves of the activations, all sum in f32. mma.cu unpacks weights on their way, cuBLAS is faster where
unpacking the whole matrix first is shared by many.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64
from typing import Protocol

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix, is_float
from worker.cuda.matmul import Epilogue, Part

CUBLAS_TOKENS = 64  # from here on; below, reading the weights once is what counts
_ROW_TILE = 128
_LINE_BYTES = 256  # 128 columns of halves
_F16 = 1


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


def token_tile_for(n_tokens: int) -> int:
    """The smallest tile that holds the tokens, at most 64."""
    return next((tile for tile in (16, 32, 64) if n_tokens <= tile), 64)


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
    """Enqueue mma.cu; with `activation` first is gate and second up, and the output is in halves."""
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
