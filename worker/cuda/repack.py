"""File bytes of a matrix on the device to the planar rows that the kernels read."""

from __future__ import annotations

from ctypes import c_int, c_uint64
from typing import Any

from worker.cuda.driver import Launcher
from worker.cuda.formats import UNIT_WEIGHTS, is_float, planar_row_bytes
from worker.model.types import BY_ID

_THREADS = 128


def repack(launcher: Launcher, type_id: int, cols: int, n_rows: int, source: int, target: int) -> None:
    """Planar rows of `n_rows` file rows (of any number of experts) from `source` at `target`, 16-byte aligned.

    `target` takes n_rows * planar_row_bytes(type_id, cols) bytes and must not overlap `source`.
    """
    planar_bytes = planar_row_bytes(type_id, cols)
    if is_float(type_id):
        file_words, planar_words = BY_ID[type_id].row_bytes(cols) // 2, planar_bytes // 2
        function = launcher.function("repack.cu", "copy_rows", {"WEIGHT_TYPE": 2, "COLS": 64})
        blocks = -(-n_rows * planar_words // _THREADS)
        args: tuple[Any, ...] = (source, target, c_int(file_words), c_int(planar_words), c_uint64(n_rows))
    else:
        function = launcher.function("repack.cu", "repack", {"WEIGHT_TYPE": type_id, "COLS": cols})
        blocks = -(-n_rows * -(-cols // UNIT_WEIGHTS) // _THREADS)
        args = (source, target, c_uint64(n_rows))
    launcher.launch(function, blocks, _THREADS, 0, args)
